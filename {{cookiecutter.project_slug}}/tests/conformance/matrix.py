"""Strategies by properties: what each is shown to compute, how exactly, or why it refuses.

A strategy that is registered and has no row here fails the suite.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..project import horovodrun, mpirun


@dataclass(frozen=True)
class Property:
    """One way to train the subject.

    Args:
        tolerance: largest difference of a weight, or a logged loss, from one process'; 0: to the
            last bit.
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
    """

    launches: tuple[Launch, ...]
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    reads_by_node: bool = False
    only: tuple[str, ...] = tuple(PROPERTIES)
    resumed: float = 0.0

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
    *("clip value", "batchnorm", "sync batchnorm", "drop last", "uneven"),
)


def _more(devices: int, **options: Any) -> Launch:
    return Launch(devices, slow=True, only=COUNT_MATTERS, **options)


TWO_AND_THREE = (Launch(2), _more(3))
# For what differs from another row in one thing alone.
SLOWLY = (Launch(2, slow=True), _more(3))
# Even and uneven divisions of the subject's parameters need more than two processes.
TWO_AND_FOUR = (Launch(2), _more(4))
SLOWLY_ON_FOUR = (Launch(2, slow=True), _more(4))
FAIRSCALE = (Launch(2, engine="fairscale"), _more(4, engine="fairscale"))
FAIRSCALE_SLOWLY = (Launch(2, engine="fairscale", slow=True), FAIRSCALE[1])
ONE_OPTIMIZER = ("sgd", "adam", "accumulation", "clip norm")
DEEPSPEED = (Launch(2, engine="deepspeed"), _more(4, engine="deepspeed"))
DEEPSPEED_SLOWLY = (Launch(2, engine="deepspeed", slow=True), DEEPSPEED[1])
SPARSE = ("sparse", "sparse, clipped", "sparse, manual")
NO_SPARSE = dict.fromkeys(SPARSE, "words.weight has sparse gradients")
NOT_FOUND = dict.fromkeys(
    ("experts", "experts, clipped"),
    "has no option 'find_unused_parameters': .* use strategy='fsdp' or 'ddp'",
)
DEEPSPEED_REFUSES = {
    **NO_SPARSE,
    **NOT_FOUND,
    "two optimizers": "DeepSpeed steps one optimizer with one scheduler",
    "manual": "its engine runs one backward and one step at a time",
    **dict.fromkeys(("bf16 true", "fp16 true"), "steps parameters in float32"),
}
OFFLOADED = ("sgd", "adam", "accumulation", "clip norm", "clip value", "bf16", "fp16")
REPLICAS_REFUSE = {
    **dict.fromkeys(("manual", "sparse, manual"), "training_step runs once a replica"),
    "sync batchnorm": "a replica normalizes by its own piece of the batch",
}

# The subject is small: so are its units.
SMALL_UNITS = {"unit_parameters": 100}

MATRIX = {
    "single_device": Row((Launch(1),)),
    "dp": Row(
        TWO_AND_THREE,
        refused={**REPLICAS_REFUSE, "fp16": "gradient scaling with replicas"},
        reads_by_node=True,
    ),
    "ddp": Row(TWO_AND_THREE),
    "ddp, static graph": Row(
        SLOWLY,
        "ddp",
        {"static_graph": True},
        only=(*ONE_OPTIMIZER, "batchnorm"),
        # DDP sums the first step of a static graph, which it learns in it, in another order.
        resumed=1e-6,
    ),
    "ddp, unused parameters": Row(
        SLOWLY, "ddp", {"find_unused_parameters": True}, only=ONE_OPTIMIZER
    ),
    "ddp, fp16 hook": Row(
        SLOWLY,
        "ddp",
        {"communication_hook": "fp16"},
        # Gradients lose what is below 2^-11 of them, in each of ten steps.
        dict.fromkeys(ONE_OPTIMIZER, 2e-3),
        only=ONE_OPTIMIZER,
    ),
    "ddp, bf16 hook": Row(
        SLOWLY,
        "ddp",
        {"communication_hook": "bf16"},
        dict.fromkeys(ONE_OPTIMIZER, 2e-2),
        only=ONE_OPTIMIZER,
    ),
    "ddp, PowerSGD": Row(
        SLOWLY,
        "ddp",
        {"communication_hook": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 3},
        # Two columns stand for a gradient; what is left out comes a step later.
        dict.fromkeys(ONE_OPTIMIZER, 0.2),
        only=ONE_OPTIMIZER,
    ),
    # As ddp, and each of their runs starts processes of its own, which takes seconds.
    "ddp_spawn": Row(SLOWLY, only=("sgd", "two optimizers", "bf16")),
    "ddp_fork": Row(TWO_AND_THREE, only=("sgd", "two optimizers", "bf16")),
    "ddp_notebook": Row((Launch(2),), only=("sgd",)),
    "ddp2": Row(
        (Launch(2, slow=True), _more(3), Launch(2, nodes=2)),
        refused=REPLICAS_REFUSE,
        reads_by_node=True,
    ),
    "ddp_zero1": Row(TWO_AND_THREE),
    "fsdp": Row(TWO_AND_FOUR, options=SMALL_UNITS, refused=NO_SPARSE),
    "fsdp, offload": Row(
        SLOWLY_ON_FOUR,
        "fsdp",
        {**SMALL_UNITS, "offload": True},
        only=(*ONE_OPTIMIZER, "clip value", "two optimizers", "manual", "experts", "bf16"),
    ),
    "fsdp, bfloat16 units": Row(
        SLOWLY_ON_FOUR,
        "fsdp",
        {**SMALL_UNITS, "parameter_dtype": "bfloat16", "reduce_dtype": "float32"},
        only=("bf16",),
    ),
    "fsdp, whole gradients": Row(
        SLOWLY_ON_FOUR,
        "fsdp",
        {**SMALL_UNITS, "accumulate_in_parts": False, "reshard_after_forward": False},
        only=(*ONE_OPTIMIZER, "experts, clipped"),
    ),
    "hsdp": Row(SLOWLY_ON_FOUR, options={**SMALL_UNITS, "shard_size": 2}, refused=NO_SPARSE),
    "ddp_sharded": Row(FAIRSCALE, refused=NO_SPARSE),
    "ddp_sharded, fp16": Row(
        FAIRSCALE_SLOWLY[:1],
        "ddp_sharded",
        {"reduce_fp16": True},
        # As with DDP's hook.
        dict.fromkeys(ONE_OPTIMIZER, 2e-3),
        only=ONE_OPTIMIZER,
    ),
    "ddp_sharded_spawn": Row(
        FAIRSCALE_SLOWLY,
        # As ddp_sharded, in processes whose start takes seconds.
        only=("sgd", "two optimizers", "bf16"),
    ),
    "fairscale_fsdp": Row(
        FAIRSCALE_SLOWLY,
        refused={
            **NO_SPARSE,
            **NOT_FOUND,
            "manual": "FairScale gathers parameters for one forward and one backward",
            **dict.fromkeys(("bf16 true", "fp16 true"), "parameters are cut in float32"),
        },
    ),
    "fairscale_fsdp, units": Row(
        FAIRSCALE[1:],
        "fairscale_fsdp",
        {"min_num_params": 1},
        only=(*ONE_OPTIMIZER, "two optimizers", "batchnorm", "sync batchnorm", "bf16", "fp16"),
    ),
    "horovod": Row(
        (
            Launch(2, by=horovodrun, engine="horovod"),
            _more(3, by=horovodrun, engine="horovod"),
        ),
        options={"scale_learning_rate": False},
        refused={
            **dict.fromkeys(("manual", "sparse, manual"), "optimizers expect one backward a step"),
            "bf16": "know no bfloat16",
            "bf16 true": "know no bfloat16",
        },
    ),
    "horovod, mpirun": Row(
        (Launch(2, by=mpirun, engine="horovod", slow=True),),
        "horovod",
        {"scale_learning_rate": False},
        only=ONE_OPTIMIZER,
    ),
    "deepspeed": Row(
        DEEPSPEED_SLOWLY[:1], refused=DEEPSPEED_REFUSES, only=("sgd", "two optimizers")
    ),
    "deepspeed, stage 0": Row(DEEPSPEED_SLOWLY, "deepspeed", {"stage": 0}, only=ONE_OPTIMIZER),
    "deepspeed_stage_1": Row(DEEPSPEED_SLOWLY, refused=DEEPSPEED_REFUSES),
    "deepspeed_stage_2": Row(DEEPSPEED, refused=DEEPSPEED_REFUSES),
    "deepspeed_stage_3": Row(DEEPSPEED_SLOWLY, refused=DEEPSPEED_REFUSES),
    "deepspeed_stage_2_offload": Row(DEEPSPEED_SLOWLY, only=OFFLOADED),
    "deepspeed_stage_3_offload": Row(DEEPSPEED_SLOWLY, only=OFFLOADED),
}

# Strategies that are wrong on purpose, in the properties of the closest bound and of the widest.
FAULTY_ROW = Row((Launch(2),), only=("sgd", "bf16", "bf16 true", "fp16 true"))


@dataclass(frozen=True)
class Portable:
    """How a strategy is started to save what others load, and to load what they saved."""

    saves: Launch = Launch(2)
    loads: Launch = Launch(4)


def _by_horovod(processes: int) -> Launch:
    return Launch(processes, by=horovodrun, engine="horovod")


_FAIRSCALE = Portable(*(Launch(devices, engine="fairscale") for devices in (2, 4)))
_DEEPSPEED = Portable(*(Launch(devices, engine="deepspeed") for devices in (2, 4)))


# Those that keep parameters or states in a form of their own; the others are made of these.
PORTABLE = {
    "single_device": Portable(Launch(1), Launch(1)),
    "dp": Portable(),
    "ddp": Portable(),
    "ddp_zero1": Portable(),
    "fsdp": Portable(),
    "hsdp": Portable(Launch(4), Launch(2)),
    "ddp_sharded": _FAIRSCALE,
    "fairscale_fsdp": _FAIRSCALE,
    "deepspeed_stage_1": _DEEPSPEED,
    "deepspeed_stage_2": _DEEPSPEED,
    "deepspeed_stage_3": _DEEPSPEED,
    "horovod": Portable(_by_horovod(2), _by_horovod(3)),
}
