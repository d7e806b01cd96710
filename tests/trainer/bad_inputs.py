"""Bad options, files, environments and arguments: what :mod:`test_bad_inputs` attacks with.

Each is a mistake that a user has made or can make. Add those that are found later.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bad_files import BIG, BOMB, DIGITS, FILES, SECTIONS


@dataclass(frozen=True)
class Bad:
    """``what``: for a person; ``named``: what each line that refuses it begins with or holds."""

    what: str
    named: tuple[str, ...]
    words: tuple[str, ...] = ()
    file: bytes | None = None
    variables: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


_NUMBERS = ("three", "1.5", "true", "[1]", "{a: 1}", "null", "0", "-1", "nan", "1e400", BIG)
_OPTIONAL_NUMBERS = tuple(text for text in _NUMBERS if text != "null")
_SWITCHES = ("2", "maybe", "2.0", "[true]", "{a: true}", "null", "on_", BIG)
# By option: texts that it must refuse.
OPTIONS: dict[str, tuple[str, ...]] = {
    "max_epochs": _OPTIONAL_NUMBERS,
    "max_steps": _OPTIONAL_NUMBERS,
    "global_batch_size": _OPTIONAL_NUMBERS,
    "num_nodes": (*_OPTIONAL_NUMBERS, "2", "1000000"),
    "accumulate_grad_batches": _NUMBERS,
    "log_every_n_steps": _NUMBERS,
    "check_val_every_n_epoch": _NUMBERS,
    "sanity_check": tuple(text for text in _NUMBERS if text != "0"),
    "num_sanity_val_steps": ("three", "1.5", "true", "[1]", "{a: 1}", "-1"),
    "max_time": ("5", "1:30", "00:00:00:00", "[1]", "{a: 1}", "{hours: -1}", "true", BIG),
    "limit_train_batches": ("all", "0", "-1", "1.5", "true", "[1]", "{a: 1}", "null", ".nan", BIG),
    "limit_val_batches": ("all", "-1", "1.5", "true", "[1]", "{a: 1}", "null", ".nan", BIG),
    "limit_test_batches": ("all", "0", "-1", "1.5", "true", "[1]", "{a: 1}", "null", ".nan", BIG),
    "limit_predict_batches": ("all", "0", "-1", "1.5", "true", "[1]", "null", ".nan", BIG),
    "overfit_batches": ("all", "-1", "1.5", "true", "[1]", "{a: 1}", "null", ".nan", BIG),
    "fast_dev_run": ("maybe", "-1", "1.5", "[true]", "{a: 1}", "null", BIG),
    "val_every_n_steps": _OPTIONAL_NUMBERS,
    "checkpoint_every_n_steps": _OPTIONAL_NUMBERS,
    "checkpoint_every_n_epochs": _NUMBERS,
    "keep_checkpoints": (*_NUMBERS, "1"),
    "reference_batch_size": _OPTIONAL_NUMBERS,
    "learning_rate_warmup_steps": tuple(text for text in _NUMBERS if text != "0"),
    "seed": tuple(text for text in _NUMBERS if text != "0"),
    "gradient_clip_val": ("high", "[1]", "{a: 1}", "0", "-0.5", ".nan", ".inf", "true", BIG),
    "sync_batchnorm": _SWITCHES,
    "compile": _SWITCHES,
    "meta_device": _SWITCHES,
    "deterministic": _SWITCHES,
    "use_distributed_sampler": _SWITCHES,
    "async_checkpoints": _SWITCHES,
    "enable_progress_bar": _SWITCHES,
    "auto_select_gpus": _SWITCHES,
    "devices": ("0", "-2", "1,1", "x", "[]", "[a]", "1.5", "{a: 1}", "true", "100000", BIG, "[-1]"),
    "accelerator": ("gpus", "gpu", "[cpu]", "5", "quantum", "fsdp"),
    "strategy": (
        *("dpd", "DDP", "5", "[ddp]", "{a: 1}", ".ddp", "a..b", "no.such.Strategy", "os.path"),
    ),
    "strategy_options": ("5", "[1]", "text", "{bucket: 1}", "true"),
    "precision": ("8", "64", "bf16-mix", "[16]", "half", "1.5", "{a: 1}", "null", BIG),
    "matmul_precision": ("hihg", "tf32", "5", "[high]", "{a: 1}", "true"),
    "cudnn_benchmark": tuple(text for text in _SWITCHES if text != "null"),
    "gradient_clip_algorithm": ("nrm", "5", "[norm]", "null", "{a: 1}"),
    "learning_rate_scaling": ("cubic", "5", "[linear]", "null", "true"),
    "uneven_inputs": ("drop", "5", "[join]", "null"),
    "nonfinite_loss": ("back", "5", "true", "[skip]", "null"),
    "activation_checkpointing": ("5", "{a: 1}", "Block", "[5]", "null"),
    "run_name": ("../x", "a/b", ".hidden", "a b", "[a]", "{a: 1}", "-x", "é", "x" * 129, BIG),
    "default_root_dir": (
        *("~nobody.here/runs", "$NOT_SET/runs", "${NOT_SET}", "/dev/null", "x" * 300),
    ),
    "resume": ("gone", "auto", "[a]", "{a: 1}", "~nobody.here", "$NOT_SET", "/dev/null", "x" * 300),
    "weights": ("gone", "5", "[a]", "{a: 1}", "~nobody.here", "$NOT_SET", "/dev/null", "x" * 300),
    "weights_strict": (*_SWITCHES, "false"),
    "loggers": ("cvs", "csv", "[cvs]", "[5]", "5", "{a: 1}", "null", "[aim]", "true"),
    "gpus": ("two", "1.5", "{a: 1}", "true", "auto"),
    "tpu_cores": ("8", "0", "x", "[1]", "true"),
    "plugins": ("[]", "[a, b]", "apex", "5", "{a: 1}"),
    "amp_backend": ("apex", "amp", "5", "true"),
    "replace_sampler_ddp": ("2", "maybe", "[true]"),
    "resume_from_checkpoint": ("gone", "[a]", "{a: 1}"),
    "logger": ("aim", "5", "[5]", "{a: 1}"),
}
# What else than its own name a line may name an option by.
ALSO = {
    "gpus": ("devices",),
    "plugins": ("strategy",),
    "resume_from_checkpoint": ("resume",),
    "num_sanity_val_steps": ("sanity_check",),
    "logger": ("loggers",),
    "tpu_cores": ("strategy",),
    "strategy_options": ("strategy_options",),
}

NAMES: dict[str, tuple[str, ...]] = {
    "strategy": (
        *("tpu", "tpu_spawn", "rpc_sequential", "gpipe", "model_parallel"),
        *("ps", "ddp_fully_sharded", "apex", "mps", "fsdp_native", "colossalai"),
        *("ddp_sharded_find_unused_parameters_false", "ddp_find_unused_parameters_false"),
        *("bagua", "ddp_cpu", "gpu", "hivemind", "zero2", "deepspeed_stage_3_offload_nvme"),
    ),
    "accelerator": ("tpu_spawn", "mps", "ipu", "hpu", "xpu", "npu", "xla", "apex", "bagua", "rpc"),
    "plugins": ("ddp_fully_sharded", "fsdp_native", "apex", "native"),
    "precision": ("double", "fp16", "bfloat16", "transformer-engine", "64-true", "nf4", "apex"),
    "loggers": ("[comet]", "[clearml]", "[neptune]", "[TensorBoardLogger]"),
    "amp_backend": ("apex",),
}


class Odd:
    """An object that raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = object.__hash__


# Switches that take a number as well.
NUMBERED_SWITCHES = ("fast_dev_run",)


def _wrong_values(default: Any) -> list[Any]:
    """What no argument takes, and what only those of another type take."""
    anything = [Odd(), b"x", object(), {1, 2}, 1j, lambda: None, 10**DIGITS]
    if isinstance(default, bool):
        return [*anything, 1, 0, "true", None, 1.0]
    if isinstance(default, int):
        return [*anything, True, "2", 2.0, math.nan, [1], None]
    return anything


PYTHON: dict[str, list[Any]] = {
    "seed": ["1", 1.5, True, -1, math.nan, 2**63],
    "num_nodes": ["2", True, 1.0, 0, -1],
    "loggers": ["csv", "tensorboard", 5, None, True, ["csv", 5], {"csv"}],
    "strategy": [5, True, 1.5, ["ddp"], {"ddp": 1}, b"ddp"],
    "max_epochs": ["3", True, 3.0, math.nan, math.inf, [3], 0],
    "gradient_clip_val": ["1", True, math.nan, math.inf, -1.0, 0, [1.0]],
    "devices": [0, True, 1.5, math.nan, (0, 1), {"a": 1}, [True], [1.5], 10**9],
    "accelerator": [5, True, ["cpu"], b"cpu"],
    "precision": [5, True, 16.0, [16], math.nan, 64],
    "run_name": [5, True, ["a"], Path("a"), "a\0b", "a\nb"],
    "default_root_dir": [5, True, None, ["runs"], "a\0b", "", b"runs"],
    "resume": [5, True, ["a"], "a\0b", b"a"],
    "strategy_options": [5, True, [1], "a", {5: 1}],
    "activation_checkpointing": [5, "Block", None, True, [5], {"a"}],
    "gradient_clip_algorithm": [5, None, True, ["norm"]],
    "uneven_inputs": [5, None, True],
    "nonfinite_loss": [5, None, True],
    "learning_rate_scaling": [5, None, True],
}

OF_STRATEGY = "--trainer.strategy_options"
NAMED = OF_STRATEGY[10:]  # by the lines that refuse one
WORDS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    *(
        (f"{option} without a value", words, (f"--{option}",))
        for option in ("trainer.max_epochs", "trainer.seed", "model.width", "trainer.strategy", "x")
        for words in ((f"--{option}",), (f"--{option}=",))
    ),
    *(
        (f"{word}, which is no option", (word,), (word[:20],))
        for word in ("fast", "-x", "trainer.seed=1", "=", "é", "config.yaml", "-1")
    ),
    *(
        (f"--{name}", (f"--{name}", "1"), (f"{name.split('.')[0]}:",))
        for name in (
            *("seed", "trianer.seed", "Trainer.seed", "optimizer.lr", "lr", "devices", "gpus"),
        )
    ),
    *(
        (f"--trainer.{name}", (f"--trainer.{name}", "1"), (f"trainer.{name.split('.')[0]}:",))
        for name in (
            *("max_epoch", "epochs", "Seed", "lr", "batch_size", "max-epochs", "seed ", "..a"),
        )
    ),
    *(
        (f"--{name}", (f"--{name}", "1"), (name.split(".")[0],))
        for name in ("model.widht", "data.batchsize", "model.init_args.x", "data.init_args.shfit")
    ),
    ("a value of 5,000 characters", ("--trainer.strategy", "x" * DIGITS), ("strategy=",)),
    ("an option of 5,000 characters", (f"--{'x' * DIGITS}", "1"), ("x" * 20,)),
    ("100,000 brackets", ("--trainer.loggers", "[" * 100_000), ("--trainer.loggers",)),
    ("a bomb of aliases", (OF_STRATEGY, BOMB), (OF_STRATEGY,)),
    ("a key twice", (OF_STRATEGY, "{a: 1, a: 2}"), (OF_STRATEGY,)),
    ("a number for the trainer", ("--trainer", "5"), ("trainer:",)),
    *(
        (" ".join(words), tuple(f"--trainer.{word}" for word in words), named)
        for words, named in (
            (("strategy=ddp", "devices=3", "global_batch_size=8"), ("global_batch_size=8",)),
            (("strategy=single_device", "devices=2"), ("strategy='single_device'",)),
            (("max_epochs=null",), ("give max_epochs",)),
            (("uneven_inputs=join", "sync_batchnorm=true"), ("uneven_inputs='join'",)),
            (("reference_batch_size=8",), ("reference_batch_size=8",)),
            (("gradient_clip_algorithm=value",), ("gradient_clip_algorithm='value'",)),
            (("peak_flops=1e12",), ("peak_flops",)),
        )
    ),
    ("a value of --print_config", ("--print_config=yes",), ("--print_config=yes",)),
    ("a file that is not there", ("--config", "gone.yaml"), ("--config gone.yaml",)),
    ("a directory", ("--config", "."), ("--config .",)),
    ("a device", ("--config", "/dev/zero"), ("--config /dev/zero",)),
    ("YAML in the place of a file", ("--config", "{trainer: {seed: 1}}"), ("--config",)),
    ("a path that is too long", ("--config", "x" * DIGITS), ("--config",)),
    ("a file in a variable that is not set", ("--config", "$NOT_SET/a.yaml"), ("--config",)),
    ("a file of nobody", ("--config=~nobody.here/a.yaml",), ("--config",)),
    ("a checkpoint for fit", ("--checkpoint", "runs/a"), ("checkpoint:",)),
    *(
        (f"options {options}", ("--trainer.strategy", name, OF_STRATEGY, options), (NAMED,))
        for name, options in (
            ("ddp", "{bucket_cap_mb: x}"),
            ("ddp", "{find_unused_parameters: 1}"),
            ("ddp", "{timeout_seconds: -1}"),
            ("ddp", "{timeout_seconds: .nan}"),
            ("ddp", "{timeout_seconds: 1e20}"),
            ("ddp", "{timeout_seconds: null}"),
            ("ddp", "{communication_hook: 5}"),
            ("ddp", "{communication_hook: fp8}"),
            ("ddp", "{powersgd_rank: 0}"),
            ("ddp", "{bucket_cap_mb: [1]}"),
            ("fsdp", "{unit_classes: 5}"),
            ("fsdp", "{offload: 1}"),
            ("single_device", "{a: 1}"),
            ("ddp", "{1: 2}"),
        )
    ),
]
CLASSES = ("Refuses", "Crashes", "NeedsWidth")

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# What a command inherits from rank 1 of a run of our launcher that starts it.
INHERITED = {
    **RANK,
    "RANK": "1",
    "LOCAL_RANK": "1",
    "TRAINER_CLUSTER": "environment",
    "TRAINER_PARENT_PID": "1234567",
    "TRAINER_RANK_PID": "1234568",
}
_SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "here",
}
ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    *(
        ({"TRAINER_CLUSTER": value}, "TRAINER_CLUSTER")
        for value in ("", "slurm", "torchrun", "srun")
    ),
    *(
        ({name: value}, name)
        for name in ("TRAINER_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND")
        for value in ("foo", "nccl", "gloo,nccl", "tpu:gloo", "cpu:", ",", "undefined", "GLOOO")
    ),
    *(
        ({"TRAINER_SAVE_SECONDS": value}, "TRAINER_SAVE_SECONDS")
        for value in ("x", "-1", "nan", "inf")
    ),
    *(({"TRAINER_PARENT_PID": value}, "TRAINER_PARENT_PID") for value in ("x", "-1", BIG)),
    *(({"TRAINER_OUTCOME": value}, "TRAINER_OUTCOME") for value in ("/gone/x", ".", "x" * 300)),
    *(({"TRAINER_STORE": value}, "TRAINER_STORE") for value in ("/etc/passwd", "store", "/gone/x")),
    *(({name: "x"}, name) for name in ("NNODES", "NUM_NODES", "OMP_NUM_THREADS")),
    *(
        ({"GLOO_SOCKET_IFNAME": value}, "GLOO_SOCKET_IFNAME")
        for value in ("nope0", "lo,nope0", ",")
    ),
    *(
        (RANK | {name: value}, name)
        for name in RANK
        if name != "MASTER_ADDR"
        for value in ("", "x", "1.5", BIG)
    ),
    *((RANK | {name: "-1"}, "environment") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    *((RANK | {name: "-1"}, name) for name in ("LOCAL_WORLD_SIZE", "MASTER_PORT")),
    *((RANK | {"MASTER_PORT": value}, "MASTER_PORT") for value in ("0", "99999", "65536")),
    (RANK | {"WORLD_SIZE": str(10**12)}, "environment: rank 0 of 1000000000000"),
    (RANK | {"LOCAL_WORLD_SIZE": "3"}, "local rank 0 of 3"),
    *((RANK | {"RANK": value}, "rank") for value in ("2", "100")),
    *(
        (_SLURM | {name: value}, "srun")
        for name in _SLURM
        if name not in ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
        for value in ("x", "-1")
        if (name, value) != ("SLURM_STEP_ID", "-1")
    ),
    *((_SLURM | {"MASTER_PORT": value}, "MASTER_PORT") for value in ("99999", "x")),
]


def options() -> Iterator[Bad]:
    for table in (OPTIONS, NAMES):
        for option, values in table.items():
            for value in values:
                named = (option, *ALSO.get(option, ()))
                what = f"{option} {value[:20]}"
                yield Bad(what, ("|".join(named),), (f"--trainer.{option}", value))
    for what, words, names in WORDS:
        yield Bad(what, names, words)
    for name in CLASSES:
        yield Bad(f"a class: {name}", ("model",), ("--model", f"test_bad_inputs.{name}"))


def files() -> Iterator[Bad]:
    for what, content, said in FILES:
        yield Bad(what, (said,), file=content if isinstance(content, bytes) else content.encode())
    for what, text, named in SECTIONS:
        yield Bad(what, named, file=text.encode())


def environments() -> Iterator[Bad]:
    for variables, named in ENVIRONMENTS:
        yield Bad(f"{named} {list(variables.values())[-1][:20]}", (named,), variables=variables)


def arguments(defaults: dict[str, Any]) -> Iterator[Bad]:
    for option, values in PYTHON.items():
        for value in values:
            yield Bad(option, (f"{option}",), arguments={option: value})
    for option, default in defaults.items():
        for value in _wrong_values(default):
            if option in NUMBERED_SWITCHES and type(value) is int and abs(value) <= 1:
                continue
            if option == "seed" and value is None:  # as if it were not given
                continue
            named = "|".join((option, *ALSO.get(option, ())))
            yield Bad(option, (named,), arguments={option: value})
    # Several at once, of a fixed seed: each has its own line.
    draw = random.Random(0)
    for _ in range(60):
        chosen = draw.sample([name for name in PYTHON if name not in ("devices", "strategy")], 3)
        values = {name: draw.choice(PYTHON[name]) for name in chosen}
        yield Bad("several", tuple(chosen), arguments=values)
