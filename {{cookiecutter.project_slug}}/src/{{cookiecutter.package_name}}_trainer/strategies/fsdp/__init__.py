"""Torch's fully sharded data parallel (FSDP2), plain and hybrid."""

from ..registry import Entry, Registration

REGISTRATION = Registration({"fsdp": Entry("fsdp:FSDP"), "hsdp": Entry("hsdp:HSDP")})
