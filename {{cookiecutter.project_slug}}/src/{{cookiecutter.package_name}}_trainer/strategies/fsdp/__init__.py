"""Torch's fully sharded data parallel (FSDP2), plain and hybrid.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ..registry import Entry, Registration

_LACKS = {"accumulate_in_parts": "it is called reduce_every_microbatch now"}

REGISTRATION = Registration(
    {"fsdp": Entry("fsdp:FSDP", lacks=_LACKS), "hsdp": Entry("fsdp:HSDP", lacks=_LACKS)}
)
