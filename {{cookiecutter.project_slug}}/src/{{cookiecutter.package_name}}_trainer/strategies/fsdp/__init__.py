"""Torch's fully sharded data parallel (FSDP2), plain and hybrid.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ..registry import Entry, Registration

REGISTRATION = Registration({"fsdp": Entry("fsdp:FSDP"), "hsdp": Entry("hsdp:HSDP")})
