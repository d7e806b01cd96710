"""What a row of the matrix is made of: ways to train, ways to start processes, tolerances."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..project import mpirun


def rounding(operations: int, largest: float, dtype: torch.dtype = torch.float32) -> float:
    """Largest difference that rounding explains between two computations of the same numbers.

    Processes add up parts of a batch, and each CPU's kernels parts of a vector, in another order.
    An operation rounds by at most half a unit in the last place: ``eps / 2`` of its result. The
    roundings of n operations add up like a random walk, to less than ``4 * sqrt(n)`` of one
    (Higham and Mary 2019, https://doi.org/10.1137/18M1226312).

    Args:
        operations: Number of operations in a row.
        largest: Largest value that is compared.
        dtype: In which each operation rounds.
    """
    return 4 * math.sqrt(operations) * largest * torch.finfo(dtype).eps / 2


# Ten steps. In each, a value goes through sums over 6, 16 and 16 inputs, back through as many, and
# is added up over 24 samples. A rate of 0.1 and a momentum of 0.9 add an error to a weight once.
# The largest values are losses of 6. The planted faults differ by more than 0.01.
ROUNDING = rounding(10 * 100, 8.0)


@dataclass(frozen=True)
class Property:
    """One way to train the subject.

    Args:
        subject: arguments of the subject.
        trainer: arguments of the trainer.
        alone: arguments of the subject where one process trains it for comparison.
        trainer_alone: arguments of the trainer then.
        options: of the strategy, where it has them or refuses the way.
        tolerance: largest difference of a weight, a logged loss, or a number that a callback saves,
            from one process'; 0: to the last bit.
    """

    subject: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)
    trainer_alone: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = ROUNDING


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

# Half precision rounds results of layers, in each of ten steps: of three layers forward and back,
# in each of 24 samples, whose mean is a gradient. Weights that are rounded too are so after each
# step: those of 2 by up to 8e-3 and 1e-3; their bounds are a few of these roundings. The planted
# faults differ by more than 0.84.
BFLOAT16 = rounding(10 * 6, 1.0, torch.bfloat16) / math.sqrt(24)
# Units in bfloat16 compute without autocast: what is between the three layers is rounded too, which
# are two activations, forward and back.
BFLOAT16_UNITS = rounding(10 * 10, 1.0, torch.bfloat16) / math.sqrt(24)

PROPERTIES = {
    "sgd": Property(),
    "adam": Property({"optimizer": "adam"}),
    "two optimizers": Property({"optimizer": "two"}),
    "manual": Property({"kind": "adversarial"}),
    "scheduler": Property({"schedule": True}),
    "scaled rate": Property({"schedule": True}, {"learning_rate_scaling": "linear", **SCALED}),
    "drop last": Property({"drop_last": True}),
    "uneven": Property(
        {"uneven": True},
        {"uneven_inputs": "join", "global_batch_size": None},
        {"uneven": True, "in_pieces": True},
    ),
    "averaged": Property({"kind": "validated"}, AVERAGED),
    "accumulation": Property(trainer={"accumulate_grad_batches": 2}),
    "clip norm": Property(trainer={"gradient_clip_val": 0.1}),
    "clip value": Property(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "batchnorm": Property(
        {"norm": True, "drop_last": True},
        alone={"norm": True, "drop_last": True, "in_pieces": True},
    ),
    "sync batchnorm": Property(
        {"norm": True}, {"sync_batchnorm": True}, trainer_alone={"sync_batchnorm": False}
    ),
    "experts": Property({"kind": "experts"}, options=UNUSED),
    "experts, clipped": Property({"kind": "experts"}, CLIPPED_SUM, options=UNUSED),
    "sparse": Property({"kind": "words"}),
    "sparse, clipped": Property({"kind": "words"}, CLIPPED_SUM),
    "sparse, manual": Property({"kind": "manual words"}),
    "bf16": Property(trainer={"precision": "bf16-mixed"}, tolerance=BFLOAT16),
    # Small enough that no scaled gradient overflows: a process' part of a batch has a larger mean
    # gradient than the whole, and so would skip other steps.
    "fp16": Property({"scale": 0.1}, {"precision": "16-mixed"}, tolerance=1e-3),
    "bf16 true": Property(trainer={"precision": "bf16-true"}, tolerance=4e-2),
    "fp16 true": Property(trainer={"precision": "16-true"}, tolerance=1e-2),
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
        is_alias: it is another strategy that is started in another way, and nothing else.
        weekly: CI tries it once a week, because another row runs the same code on each push.
    """

    launches: tuple[Launch, ...]
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    reads_by_node: bool = False
    only: tuple[str, ...] = tuple(PROPERTIES)
    is_alias: bool = False
    weekly: bool = False

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
# Of a launch that is slow, what CI tries on each push.
COVERING = ("clip norm", "uneven")
# Of every launch, what CI tries once a week: another property contains it, or runs the same code.
CONTAINED = (
    *("scheduler", "scaled rate", "drop last", "batchnorm", "clip value", "experts"),
    *("sparse", "sparse, manual", "bf16 true", "fp16 true"),
)


def more(devices: int, **options: Any) -> Launch:
    """A slow launch on more devices, in the ways that their number matters to."""
    return Launch(devices, slow=True, only=COUNT_MATTERS, **options)


ONE_OPTIMIZER = ("sgd", "adam", "accumulation", "clip norm")
# The subject is small: so are its units.
SMALL_UNITS = {"unit_parameters": 100}
IN_UNITS = {"bf16": BFLOAT16_UNITS}
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
