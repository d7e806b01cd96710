"""Strategies in which each process, or each device, holds a replica of the whole model."""

from dataclasses import replace

from ..base import SingleDevice
from ..registry import Entry, Registration

_DDP = Entry(
    "ddp:DDP",
    lacks={
        "gradient_as_bucket_view": "gradients always are views of its buckets; leave it out",
        "broadcast_buffers": "rank 0's buffers are broadcast before each step; leave it out",
        "static_graph": "a step may use a parameter several times without it; leave it out",
    },
)
_FORKED = _DDP.on_one_node(
    "fork", "ddp in processes that are forked for one call, in a notebook or a script"
)
REGISTRATION = Registration(
    {
        "single_device": Entry(SingleDevice),
        "dp": Entry("dp:DP"),
        "ddp": _DDP,
        # Both start processes for one call, after which weights and metrics are in the calling
        # process. Spawned processes receive the module, data and trainer pickled; forked ones
        # require that CUDA is not initialized, and compute on one CPU thread each.
        "ddp_spawn": _DDP.on_one_node(
            "spawn", "ddp in processes that are spawned for one call of a script"
        ),
        "ddp_fork": _FORKED,
        "ddp_notebook": _FORKED,
        "ddp2": replace(_DDP, strategy="dp:DDP2"),
        "ddp_zero1": replace(_DDP, strategy="ddp_zero1:DDPZeRO1"),
    },
)
