"""The DeepSpeed engine. No file outside this folder names it; deleting the folder removes it."""

from dataclasses import replace
from typing import Any

from ...launch.cluster import Environment, Layout, Names, Source, check_filled, read_named
from ..registry import Entry, Registration

_NAMES = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def _read(env: Environment) -> Layout:
    return check_filled(read_named(env, "deepspeed", _NAMES))


# After MPI, which the launcher can use to start ranks; before srun, whose step they inherit.
_SOURCE = Source(
    *("deepspeed", 50, _read, ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "MASTER_ADDR")),
    lambda env: [f"--local_rank={env.get('LOCAL_RANK')}"],  # by its launcher; a variable has it too
)
VARIABLES = ("TRAINER_DEEPSPEED_CONFIG", "PL_DEEPSPEED_CONFIG_PATH")  # the second is Lightning's
ELSEWHERE = (
    "use strategy='fsdp' or 'ddp', with --trainer.strategy_options.find_unused_parameters true"
)
_LACKS = {"find_unused_parameters": f"it steps all that it has flattened together; {ELSEWHERE}"}
_DEEPSPEED = Entry("deepspeed:DeepSpeed", lacks=_LACKS)


def _preset(stage: int, what: str, **options: Any) -> Entry:
    summary, preset = f"DeepSpeed ZeRO {stage}{what}", {"stage": stage, **options}
    return replace(_DEEPSPEED, summary=summary, preset=preset, base="deepspeed")


REGISTRATION = Registration(
    {
        "deepspeed": _DEEPSPEED,
        "deepspeed_stage_1": _preset(1, ": optimizer states sharded over the processes"),
        "deepspeed_stage_2": _preset(2, ": optimizer states and gradients sharded"),
        "deepspeed_stage_3": _preset(3, ": optimizer states, gradients and parameters sharded"),
        "deepspeed_stage_2_offload": _preset(
            2, " with the optimizer states on the CPU", offload_optimizer=True
        ),
        "deepspeed_stage_3_offload": _preset(
            3,
            " with parameters and optimizer states on the CPU",
            offload_optimizer=True,
            offload_parameters=True,
        ),
    },
    cluster_sources=[_SOURCE],
    variables=VARIABLES,
)
