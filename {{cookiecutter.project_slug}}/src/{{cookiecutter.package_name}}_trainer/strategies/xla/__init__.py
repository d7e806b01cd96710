"""The PyTorch/XLA engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ...launch.devices import Hardware
from ..registration import Entry, Registration
from .hardware import count_chips

_ON_TPUS = "is strategy='xla' here, one process per device; use it with accelerator='tpu'"
_DEBUG = "is strategy='xla' here; set PT_XLA_DEBUG_LEVEL=1 for the reports of PyTorch/XLA"

REGISTRATION = Registration(
    {"xla": Entry("xla:XLA")},
    accelerators={"tpu": Hardware("xla", count_chips, "xla")},
    other_names={
        **dict.fromkeys(("tpu", "tpu_spawn", "single_tpu", "single_xla"), _ON_TPUS),
        **dict.fromkeys(("tpu_spawn_debug", "xla_debug"), _DEBUG),
        "xla_fsdp": "(PyTorch/XLA's FSDP) is not built; use strategy='xla', or 'fsdp' on GPUs",
    },
)
