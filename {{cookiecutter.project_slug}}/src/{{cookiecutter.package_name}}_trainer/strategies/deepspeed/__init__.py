"""The DeepSpeed engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from typing import Any

from ..registration import Entry, Registration
from .cluster import SOURCE
from .settings import VARIABLES


def _preset(summary: str, **options: Any) -> Entry:
    return Entry("deepspeed:DeepSpeed", summary, options, base="deepspeed")


REGISTRATION = Registration(
    {
        "deepspeed": Entry("deepspeed:DeepSpeed"),
        "deepspeed_stage_1": _preset(
            "DeepSpeed ZeRO 1: optimizer states sharded over the processes", stage=1
        ),
        "deepspeed_stage_2": _preset(
            "DeepSpeed ZeRO 2: optimizer states and gradients sharded", stage=2
        ),
        "deepspeed_stage_3": _preset(
            "DeepSpeed ZeRO 3: optimizer states, gradients and parameters sharded", stage=3
        ),
        "deepspeed_stage_2_offload": _preset(
            "DeepSpeed ZeRO 2 with the optimizer states on the CPU", stage=2, offload_optimizer=True
        ),
        "deepspeed_stage_3_offload": _preset(
            "DeepSpeed ZeRO 3 with parameters and optimizer states on the CPU",
            stage=3,
            offload_optimizer=True,
            offload_parameters=True,
        ),
    },
    cluster_sources=[SOURCE],
    variables=VARIABLES,
)
