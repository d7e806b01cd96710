"""The PyTorch/XLA engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ...launch.devices import Hardware
from ..registration import Entry, Registration


def _count_chips() -> int | None:
    from .hardware import count_chips

    return count_chips()


REGISTRATION = Registration(
    {
        "xla": Entry(
            "xla:XLA",
            lacks={
                "find_unused_parameters": "it finds them without this option; leave the option out"
            },
        )
    },
    accelerators={"tpu": Hardware("xla", _count_chips, "xla")},
)
