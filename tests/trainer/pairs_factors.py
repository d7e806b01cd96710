"""The trainer's options: values that differ in effect, or why they have no place in pairs."""

from pathlib import Path
from typing import Any

from my_project_trainer import callbacks, strategies
from tests.conformance.matrix import MATRIX
from tests.conformance.rows import Row

GLOBAL_BATCH = 24
STEPS = 8
"""Of a run that is not stopped: an epoch has five."""

# Each in the form of one process per rank that its row of the conformance matrix tries first, and
# two that a script starts by itself. Other names are other ways to start one of these.
STARTED = ("ddp_spawn", "ddp_fork")
# The first values of a factor refuse the least.
STRATEGIES: dict[str, Row] = {
    name: row
    for name, row in sorted(
        MATRIX.items(), key=lambda each: each[0] not in ("ddp", "single_device")
    )
    if row.strategy is None and row.launches and (not row.is_alias or name in STARTED)
}
SAME = {name for name, row in MATRIX.items() if row.is_alias or not row.launches} - {*STARTED}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "strategy": tuple(STRATEGIES),
    "precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"),
    "max_epochs": (None, 2),
    "max_time": (None, {"hours": 10}),
    "limit_train_batches": (1.0, 0.7, 4),
    "limit_val_batches": (1.0, 0.5, 2, 0),
    "overfit_batches": (0, 2),
    "global_batch_size": (GLOBAL_BATCH, None),
    "accumulate_grad_batches": (1, 2),
    "gradient_clip_val": (None, 0.1),
    "gradient_clip_algorithm": ("norm", "value"),
    "learning_rate_scaling": ("none", "linear", "sqrt"),
    "reference_batch_size": (None, 12),
    "learning_rate_warmup_steps": (0, 3),
    "sync_batchnorm": (False, True),
    "compile": (False, True, {"regional": ["Block"], "dynamic": False}),
    "activation_checkpointing": ((), ("Block",)),
    "seed": (0, 7),
    "meta_device": (False, True),
    "deterministic": (False, True),
    "use_distributed_sampler": (True, False),
    "uneven_inputs": ("refuse", "join"),
    "log_every_n_steps": (1, 3),
    "record_hashes": (None, True, False),
    "log_gradient_norm": (False, True),
    "peak_flops": (None, 1e9),
    "check_val_every_n_epoch": (1, 2),
    "val_every_n_steps": (None, 2),
    "sanity_check": (1, 0),
    "checkpoint_every_n_steps": (None, 2),
    "checkpoint_every_n_epochs": (1, 2),
    "keep_checkpoints": (2, 3),
    "nonfinite_loss": ("stop", "skip", "ignore"),
    "async_checkpoints": (False, True),
    "weights": (None, "weights.safetensors"),
    "weights_strict": (True, False),
    "loggers": (("csv",), ("csv", "tensorboard"), ()),
    "enable_progress_bar": (False, True),
}
# The option `callbacks` takes any of them together.
CALLBACKS: dict[str, dict[str, Any]] = {
    "EMA": {"decay": 0.9},
    "StochasticWeightAveraging": {"start_epoch": 0},
    "EarlyStopping": {"monitor": "val_loss", "mode": "max", "patience": 2},
    "BestCheckpoint": {"monitor": "val_loss", "k": 2},
    "Profile": {"wait": 0, "warmup": 0, "active": 1},
    "SystemMonitor": {"every_n_seconds": 0.001},
}
EXEMPT = {
    "accelerator": "all are on the CPU",
    "devices": "as many as the strategy is tried on",
    "num_nodes": "there is one",
    "strategy_options": "each strategy has those of its row of the conformance matrix",
    "callbacks": "each callback is a factor of its own",
    "max_steps": "ends each run, and stops the one that is resumed",
    "resume": "each run is resumed",
    "resume_options": "the same in each run: nothing differs in a resume",
    "run_name": "each run has one",
    "checkpoint_weights": "no row freezes parameters from the start: test_left_out.py does",
    "default_root_dir": "each row has its own",
    "overwrite": "refused with resume, in each row",
    "fast_dev_run": "its run of one epoch saves no checkpoint that another could resume",
    "limit_test_batches": "of the test, not of a fit",
    "limit_predict_batches": "of the prediction, not of a fit",
    "matmul_precision": "of GPUs",
    "cudnn_benchmark": "of GPUs",
    "auto_select_gpus": "of GPUs",
}
FACTORS = OPTIONS | dict.fromkeys(CALLBACKS, (False, True))
SIZES = {name: len(values) for name, values in FACTORS.items()}
OTHERS = {"Callback", "HookCalls"}
BUILT_IN = {name for name in callbacks.__all__ if name[0].isupper()} - OTHERS
REGISTERED = {*strategies.names()}


def keywords(row: dict[str, int], folder: Path) -> dict[str, Any]:
    """The keywords of the trainer for a row, as JSON has them."""
    chosen = {name: FACTORS[name][index] for name, index in row.items()}
    used = [name for name in CALLBACKS if chosen.pop(name)]
    strategy = STRATEGIES[chosen["strategy"]]
    chosen["strategy_options"] = dict(strategy.options)
    chosen["devices"] = strategy.launches[0].devices
    chosen["callbacks"] = [{"class_path": name, "init_args": CALLBACKS[name]} for name in used]
    if chosen["weights"] is not None:
        kind = "small-" * (chosen["precision"] == "16-mixed")
        kind += "norm-" * chosen["sync_batchnorm"] + ("" if chosen["weights_strict"] else "part-")
        chosen["weights"] = str(folder / f"{kind}{chosen['weights']}")
    return {"accelerator": "cpu", "max_steps": STEPS, **chosen}
