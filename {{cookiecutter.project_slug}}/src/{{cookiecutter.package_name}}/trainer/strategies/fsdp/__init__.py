"""Torch's fully sharded data parallel (FSDP2), plain and hybrid."""
