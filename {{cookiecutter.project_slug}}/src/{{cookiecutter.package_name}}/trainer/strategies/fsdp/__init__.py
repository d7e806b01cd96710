"""PyTorch's fully sharded data parallel.

It may import from ``strategies/`` itself and ``gradients/``, and from the floors below.
"""

from ..registration import Entry, Registration

REGISTRATION = Registration({"fsdp": Entry("fsdp:FSDP"), "hsdp": Entry("hsdp:HSDP")})
