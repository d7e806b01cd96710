"""Names from other trainers that are not supported here, with their alternatives.

The only table of them: strategies, accelerators, plugins, precisions, loggers and callbacks. Older
spellings that can be translated are in ``legacy.py``. Remove an entry when you implement it.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping

from ..errors import nearest, shown

# Numbers that are a name: a precision in bits.
_LARGEST = 1000
_TPU = "is for TPUs, which are not supported; use accelerator='gpu' or 'cpu'"
_ZERO_2 = "(ZeRO stage 2) is not built; use strategy='fsdp', which shards parameters too"
_ASYNCHRONOUS = "trains asynchronously, which is not built; use strategy='ddp'"
_SCHEDULER = "starts processes by another framework; start this command with srun or torchrun"
_LOGGER = "is not built; use csv, tensorboard, wandb or mlflow"
_NEPTUNE = "logs to a service that closed on March 5, 2026; use csv, tensorboard, wandb or mlflow"
_NAMED_BY_CLASS = "is a class' name; use {!r}"


def _hardware(what: str) -> str:
    return f"is for {what}, which are not supported; use accelerator='gpu' or 'cpu'"


def _unused(strategy: str, value: bool = False) -> str:
    options = {"find_unused_parameters": value}
    return f"is strategy={strategy!r} with strategy_options={options}"


# An engine's folder adds what is its own, or replaces a line.
STRATEGIES: dict[str, str] = {
    **dict.fromkeys(("tpu", "tpu_spawn", "tpu_spawn_debug", "single_tpu"), _TPU),
    **dict.fromkeys(("ipu", "ipu_strategy"), _hardware("Graphcore IPUs")),
    **dict.fromkeys(("hpu", "hpu_single", "hpu_parallel"), _hardware("Gaudi HPUs")),
    "ps": "is a parameter server; use strategy='parameter_server'",
    **dict.fromkeys(("hivemind", "collaborative"), _ASYNCHRONOUS),
    **dict.fromkeys(("ray", "ray_ddp", "ray_spawn", "dask", "spark"), _SCHEDULER),
    **dict.fromkeys(
        ("fsdp_native", "fsdp2", "fully_shard"), "is PyTorch's FSDP; use strategy='fsdp'"
    ),
    **dict.fromkeys(
        ("fsdp_native_full_shard_offload", "fsdp_cpu_offload"),
        "is strategy='fsdp' with strategy_options={'offload': True}",
    ),
    "ddp_cpu": "is strategy='ddp' with accelerator='cpu'",
    "ddp_find_unused_parameters_false": _unused("ddp"),
    "ddp_find_unused_parameters_true": _unused("ddp", True),
    "ddp_spawn_find_unused_parameters_false": _unused("ddp_spawn"),
    "ddp_spawn_find_unused_parameters_true": _unused("ddp_spawn", True),
    "ddp_fork_find_unused_parameters_false": _unused("ddp_fork"),
    "ddp_fork_find_unused_parameters_true": _unused("ddp_fork", True),
    "ddp_notebook_find_unused_parameters_false": _unused("ddp_notebook"),
    "ddp_notebook_find_unused_parameters_true": _unused("ddp_notebook", True),
    **dict.fromkeys(("zero", "zero1", "zero_1"), "is strategy='ddp_zero1'"),
    **dict.fromkeys(("zero2", "zero_2", "ddp_zero2"), _ZERO_2),
    **dict.fromkeys(("zero3", "zero_3", "ddp_zero3"), "is strategy='fsdp'"),
    "colossalai": "(ColossalAI) is not built; use strategy='fsdp'",
    "bagua": (
        "(Bagua) is not built; use strategy='ddp', whose communication_hook compresses gradients"
    ),
    **dict.fromkeys(
        ("smddp", "smart_ddp"), "is SageMaker's, which is not built; use strategy='ddp'"
    ),
    "apex": "(NVIDIA apex) has no mixed precision since 2025; use precision='16-mixed'",
    "native": "is torch's own mixed precision; use precision='16-mixed' or 'bf16-mixed'",
    **dict.fromkeys(("gpu", "cuda", "cpu"), "names an accelerator; give it as accelerator"),
    "mps": _hardware("Apple GPUs"),
}

ACCELERATORS: dict[str, str] = {
    "mps": "is for Apple GPUs, which are not supported; use accelerator='cpu'",
    "ipu": _hardware("Graphcore IPUs"),
    "hpu": _hardware("Gaudi HPUs"),
    "npu": _hardware("Ascend NPUs"),
    "xpu": _hardware("Intel GPUs"),
    "rocm": "is found as a GPU; use accelerator='gpu'",
    "tpu": _TPU,
    "apex": "is a backend of mixed precision; use precision='16-mixed'",
}

_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("64", "64-true", "double", "float64", "fp64"),
        "(double precision) is not built; use '32-true'",
    ),
    **dict.fromkeys(("half", "float16", "fp16"), "is '16-mixed', or '16-true' without autocast"),
    **dict.fromkeys(("bfloat16",), "is 'bf16-mixed', or 'bf16-true' without autocast"),
    **dict.fromkeys(("float32", "fp32", "full", "tf32"), "is '32-true'"),
    **dict.fromkeys(
        ("8", "fp8", "int8", "transformer-engine", "transformer-engine-float16"),
        "(8 bits) is not built; use 'bf16-mixed'",
    ),
    **dict.fromkeys(
        ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8-training"),
        "(quantization by bitsandbytes) is not built; use 'bf16-true'",
    ),
    **dict.fromkeys(("mixed", "amp", "native"), "may mean either; use 'bf16-mixed' or '16-mixed'"),
    "apex": "has no mixed precision since 2025; use '16-mixed'",
}

_LOGGERS: Mapping[str, str] = {
    **dict.fromkeys(("neptune", "NeptuneLogger"), _NEPTUNE),
    **dict.fromkeys(("comet", "CometLogger"), _LOGGER),
    **dict.fromkeys(("test_tube", "TestTubeLogger", "clearml", "aim"), _LOGGER),
    "WandbLogger": _NAMED_BY_CLASS.format("wandb"),
    "MLFlowLogger": _NAMED_BY_CLASS.format("mlflow"),
    "CSVLogger": _NAMED_BY_CLASS.format("csv"),
    "TensorBoardLogger": _NAMED_BY_CLASS.format("tensorboard"),
}

_ALWAYS_SAVED = "checkpoints are always saved; see checkpoint_every_n_epochs, keep_checkpoints"
_SUMMARY = "use print(module)"
_BAR = "use enable_progress_bar"
_RELOADING = "training data is reshuffled each epoch by the same loader"
_LEAST = "EarlyStopping waits for its patience; leave it out"

# Arguments of other trainers, whose older spellings are not translated (``legacy.py``).
ARGUMENTS: Mapping[str, str] = {
    "max_nb_epochs": "use max_epochs",
    "min_epochs": _LEAST,
    "min_steps": _LEAST,
    "checkpoint_callback": _ALWAYS_SAVED,
    "enable_checkpointing": _ALWAYS_SAVED,
    **dict.fromkeys(("save_every_n_epochs", "every_n_epochs"), "use checkpoint_every_n_epochs"),
    "weights_save_path": "use default_root_dir",
    "ckpt_path": "use resume, or the argument checkpoint of validate, test and predict",
    "weights_summary": _SUMMARY,
    "enable_model_summary": _SUMMARY,
    "progress_bar_refresh_rate": _BAR,
    "process_position": _BAR,
    "barebones": "use loggers=[] and enable_progress_bar=False",
    "val_check_interval": "use val_every_n_steps",
    "track_grad_norm": "use log_gradient_norm",
    "terminate_on_nan": "use nonfinite_loss",
    "stop_on_nonfinite_loss": "use nonfinite_loss",
    "detect_anomaly": "use torch.autograd.set_detect_anomaly(True)",
    "auto_lr_find": "use find_learning_rate",
    "auto_scale_batch_size": "use find_batch_size",
    "profiler": "use the callback Profile",
    "stochastic_weight_avg": "use the callback StochasticWeightAveraging",
    "benchmark": "use cudnn_benchmark",
    "log_gpu_memory": "speed/peak_memory_mib is always logged",
    "move_metrics_to_cpu": "logged values are kept as single numbers; leave it out",
    "flush_logs_every_n_steps": "csv is flushed after each write; leave it out",
    "reload_dataloaders_every_epoch": _RELOADING,
    "reload_dataloaders_every_n_epochs": _RELOADING,
    "multiple_trainloader_mode": "one training loader is supported",
    "prepare_data_per_node": "prepare_data is called by one process per node; leave it out",
    "truncated_bptt_steps": "split the batch in training_step, with manual optimization",
    "amp_level": "apex has removed its mixed precision; use precision",
    "inference_mode": "evaluation runs under torch.no_grad(); leave it out",
}

# Arguments of the methods of other trainers.
_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "model": ("module",),
    "lightning_module": ("module",),
    **dict.fromkeys(("val_dataloaders", "val_data"), ("val_dataloader", "data")),
    **dict.fromkeys(("datamodule", "loader", "dataloader", "dataloaders"), ("data",)),
    **dict.fromkeys(("train_dataloader", "train_dataloaders", "test_dataloaders"), ("data",)),
    **dict.fromkeys(("ckpt_path", "checkpoint_path"), ("checkpoint",)),
    "min_lr": ("lowest",),
    "max_lr": ("highest",),
    "num_training": ("steps",),
}

_NONFINITE = "use nonfinite_loss: stop, skip, rollback or ignore"
_AVERAGE = "use EMA or StochasticWeightAveraging of trainer.callbacks"
_DEVICES = "use SystemMonitor of trainer.callbacks"

# Callbacks of other trainers whose work is done otherwise.
_CALLBACKS: Mapping[str, str] = {
    "ModelCheckpoint": "the trainer saves checkpoints; see BestCheckpoint of trainer.callbacks",
    "ModelSummary": _SUMMARY,
    "RichModelSummary": _SUMMARY,
    "LearningRateMonitor": "the learning rate is always logged, as lr; leave it out",
    "LearningRateFinder": "use the command find_learning_rate",
    "BatchSizeFinder": "use the command find_batch_size",
    **dict.fromkeys(("DeviceStatsMonitor", "GPUStatsMonitor"), _DEVICES),
    "ThroughputMonitor": "the speed is always logged; see count_tokens and peak_flops",
    "GradientAccumulationScheduler": "use accumulate_grad_batches",
    **dict.fromkeys(("StopOnNaN", "StopOnNan", "NaNMonitor", "TerminateOnNaN"), _NONFINITE),
    **dict.fromkeys(("WeightAveraging", "EMAWeightAveraging"), _AVERAGE),
    **dict.fromkeys(("TQDMProgressBar", "RichProgressBar", "ProgressBar"), _BAR),
    "Timer": "use max_time",
    "PyTorchProfiler": "use Profile of trainer.callbacks",
    "OnExceptionCheckpoint": "a run that is interrupted saves a checkpoint; leave it out",
}
_TRAINERS = ("", "lightning", "pytorch_lightning", "composer", "transformers")

_TABLES: Mapping[str, Mapping[str, str]] = {
    "strategy": STRATEGIES,
    "accelerator": ChainMap(ACCELERATORS, STRATEGIES),
    "distributed_backend": STRATEGIES,
    "plugins": STRATEGIES,
    "precision": _PRECISIONS,
    "loggers": _LOGGERS,
    "amp_backend": {"apex": _PRECISIONS["apex"]},
}


def instead_of(argument: str, known: Iterable[str]) -> str:
    """What to use instead of an argument that the trainer does not have, as ``; …``."""
    hint = ARGUMENTS.get(argument)
    return nearest(argument, known) if hint is None else f"; {hint}"


def instead_of_keyword(keyword: str, known: Iterable[str]) -> str:
    """What to use instead of a keyword that a method does not have, as ``; …``."""
    names = list(known)
    hint = next((f"; use {name}" for name in _KEYWORDS.get(keyword, ()) if name in names), "")
    if not hint and keyword in ARGUMENTS:
        hint = f"; {ARGUMENTS[keyword]}"
    return f"{hint}; known: {', '.join(names)}" if names else hint


def about(option: str, name: object) -> str | None:
    """Error line for a name that is unsupported or renamed; ``None`` for other names."""
    is_number = type(name) is int and abs(name) < _LARGEST
    text = _TABLES[option].get(str(name)) if is_number or isinstance(name, str) else None
    return None if text is None else f"{option}={name!r} {text}"


def about_callback(path: str) -> str | None:
    """Error line for a callback of another trainer, by name or class path; or ``None``."""
    module, _, name = path.rpartition(".")
    if module.partition(".")[0] not in _TRAINERS or name not in _CALLBACKS:
        return None
    return f"{name}: {_CALLBACKS[name]}"


def unknown(option: str, name: object, known: Iterable[str]) -> str:
    """Error line for an unknown name."""
    text = name if isinstance(name, str) else shown(name)
    return about(option, name) or f"{option}={shown(name)} is unknown{nearest(text, known)}"
