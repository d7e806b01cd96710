"""What a row of the matrix is made of: ways to train, ways to start processes, tolerances."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..project import mpirun


@dataclass(frozen=True)
class Property:
    """One way to train the subject.

    Args:
        tolerance: largest difference of a weight, a logged loss, or a number that a callback saves,
            from one process'; 0: to the last bit.
        subject: arguments of the subject.
        trainer: arguments of the trainer.
        alone: arguments of the subject where one process trains it for comparison.
        trainer_alone: arguments of the trainer then.
        options: of the strategy, where it has them or refuses the way.
    """

    tolerance: float
    subject: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)
    trainer_alone: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


UNUSED = {"find_unused_parameters": True}
CLIPPED_SUM = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
# Validations are with the average, and a run that is stopped after three steps has the same.
AVERAGED = {
    "callbacks": [
        {"class_path": "EMA", "init_args": {"decay": 0.9}},
        {"class_path": "BestCheckpoint", "init_args": {"monitor": "val_loss", "k": 2}},
        "tests.conformance.callbacks.Totals",
    ],
    "val_every_n_steps": 3,
}
SCALED = {"reference_batch_size": 12, "learning_rate_warmup_steps": 3}

# Half precision rounds each process' part of a batch by itself: a rounding (2^-8 and 2^-11 of a
# value) in each of ten steps, which a rate of 0.1 and a momentum of 0.9 carry into the weights. The
# planted faults differ by 0.8.
PROPERTIES = {
    "sgd": Property(1e-6),
    "adam": Property(1e-5, {"optimizer": "adam"}),
    "two optimizers": Property(1e-5, {"optimizer": "two"}),
    "manual": Property(1e-5, {"kind": "adversarial"}),
    "scheduler": Property(1e-6, {"schedule": True}),
    "scaled rate": Property(
        1e-6, {"schedule": True}, {"learning_rate_scaling": "linear", **SCALED}
    ),
    "drop last": Property(1e-6, {"drop_last": True}),
    "uneven": Property(
        1e-6,
        {"uneven": True},
        {"uneven_inputs": "join", "global_batch_size": None},
        {"uneven": True, "in_pieces": True},
    ),
    "averaged": Property(1e-6, {"kind": "validated"}, AVERAGED),
    "accumulation": Property(1e-6, trainer={"accumulate_grad_batches": 2}),
    "clip norm": Property(1e-6, trainer={"gradient_clip_val": 0.1}),
    "clip value": Property(
        1e-6, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "batchnorm": Property(
        1e-6,
        {"norm": True, "drop_last": True},
        alone={"norm": True, "drop_last": True, "in_pieces": True},
    ),
    "sync batchnorm": Property(
        1e-5,
        {"norm": True},
        {"sync_batchnorm": True},
        trainer_alone={"sync_batchnorm": False},
    ),
    "experts": Property(1e-6, {"kind": "experts"}, options=UNUSED),
    "experts, clipped": Property(1e-6, {"kind": "experts"}, CLIPPED_SUM, options=UNUSED),
    "sparse": Property(1e-6, {"kind": "words"}),
    "sparse, clipped": Property(1e-6, {"kind": "words"}, CLIPPED_SUM),
    "sparse, manual": Property(1e-6, {"kind": "manual words"}),
    "bf16": Property(2e-2, trainer={"precision": "bf16-mixed"}),
    # Small enough that no scaled gradient overflows: a process' part of a batch has a larger mean
    # gradient than the whole, and so would skip other steps.
    "fp16": Property(1e-3, {"scale": 0.1}, {"precision": "16-mixed"}),
    # Here weights too are rounded, after each step: a weight of 2 by up to 8e-3 and 1e-3. The
    # bounds are a few of these roundings, and the planted faults differ by more than 0.84.
    "bf16 true": Property(4e-2, trainer={"precision": "bf16-true"}),
    "fp16 true": Property(1e-2, trainer={"precision": "16-true"}),
}


@dataclass(frozen=True)
class Launch:
    """How a strategy is started.

    Args:
        devices: of a node.
        nodes: made up on this machine: a process each that is told so.
        by: command that starts the processes, told how many; by default the trainer does.
        engine: that must be installed; ``"torch"`` always is.
        slow: left out of a quick run of the tests.
        only: properties that are tried so; by default all of the row's.
    """

    devices: int
    nodes: int = 1
    by: Callable[[int], list[str]] | None = None
    engine: str = "torch"
    slow: bool = False
    only: tuple[str, ...] = tuple(PROPERTIES)

    @property
    def needs(self) -> tuple[str, ...]:
        """What must be installed beside torch."""
        engines = () if self.engine == "torch" else (self.engine,)
        return (*engines, "mpirun") if self.by is mpirun else engines

    @property
    def command(self) -> list[str]:
        """What Python's own command stands behind."""
        return self.by(self.devices) if self.by is not None else []

    def __str__(self) -> str:
        name = f"{self.nodes} x {self.devices}" if self.nodes > 1 else str(self.devices)
        return f"{name}, {self.by.__name__}" if self.by is not None else name


@dataclass(frozen=True)
class Row:
    """What is tried of a strategy.

    Args:
        launches: ways to start it.
        strategy: its name, where the row has another.
        options: of the strategy.
        tolerances: of properties that it computes less exactly, or more.
        refused: properties that it refuses, with a part of its reason.
        reads_by_node: a node reads its batches as one, and not each device its own.
        only: properties that are tried; by default all. For rows that differ from another in one
            thing alone.
        resumed: largest difference of a run that was resumed; 0: to the last bit.
        is_alias: it is another strategy that is started in another way, and nothing else.
    """

    launches: tuple[Launch, ...]
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    reads_by_node: bool = False
    only: tuple[str, ...] = tuple(PROPERTIES)
    resumed: float = 0.0
    is_alias: bool = False

    def ways(self, launch: Launch) -> list[str]:
        """Properties that are tried of a launch."""
        return [way for way in self.only if way in launch.only]

    def cut(self, launch: Launch) -> tuple[int, int]:
        """Into how many pieces a batch is cut, and among how many readers."""
        pieces = launch.devices * launch.nodes
        return pieces, launch.nodes if self.reads_by_node else pieces


# A quick run of the tests tries these; the others are as slow tests tried beside them.
QUICKLY = (
    *("sgd", "adam", "two optimizers", "accumulation", "clip norm", "bf16"),
    *("experts, clipped", "sparse, clipped"),
)
# What more than two processes may get wrong that two get right.
COUNT_MATTERS = (
    *QUICKLY,
    *("clip value", "batchnorm", "sync batchnorm", "drop last", "uneven", "averaged"),
)
# Of a launch that is slow, what CI tries: that of more than two processes, and that of two.
COVERING = ("clip norm", "uneven")
COVERING_ON_TWO = ("clip norm", "uneven", "averaged")
# Of every launch, what CI leaves out, because another property contains it.
CONTAINED = ("scaled rate", "drop last", "experts", "sparse", "fp16 true")


def more(devices: int, **options: Any) -> Launch:
    """A slow launch on more devices, in the ways that their number matters to."""
    return Launch(devices, slow=True, only=COUNT_MATTERS, **options)


ONE_OPTIMIZER = ("sgd", "adam", "accumulation", "clip norm")
NO_SPARSE = dict.fromkeys(
    ("sparse", "sparse, clipped", "sparse, manual"), "words.weight has sparse gradients"
)
NOT_FOUND = dict.fromkeys(
    ("experts", "experts, clipped"),
    "has no option 'find_unused_parameters': .* use strategy='fsdp' or 'ddp'",
)


@dataclass(frozen=True)
class Portable:
    """How a strategy is started to save what others load, and to load what they saved.

    Args:
        partners: the only strategies that it is tried with; default: all.
    """

    saves: Launch = Launch(2)
    loads: Launch = Launch(4)
    partners: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Engine:
    """A package besides torch, whose strategies have a folder and a file of rows of their own.

    Args:
        name: of the package and of the folder in ``strategies/``. If the folder was deleted, its
            rows are ignored.
        imports: modules that :mod:`tests.fork_server` imports once for all processes.
        variables: environment variables that these read.
    """

    name: str
    imports: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
