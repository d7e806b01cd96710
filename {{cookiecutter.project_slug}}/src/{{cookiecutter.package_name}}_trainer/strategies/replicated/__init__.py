"""Strategies in which each process, or each device, holds a replica of the whole model.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ..registration import Entry, Registration

_FORKED = Entry(
    "ddp:DDP",
    "ddp in processes that are forked for one call, in a notebook or a script",
    launcher="fork",
    max_nodes=1,
)

REGISTRATION = Registration(
    {
        "single_device": Entry("single_device:SingleDevice"),
        "dp": Entry("dp:DP"),
        "ddp": Entry("ddp:DDP"),
        # Both start processes for one call, after which weights and metrics are in the calling
        # process. Spawned processes receive the module, data and trainer pickled; forked ones
        # require that CUDA is not initialized, and compute on one CPU thread each.
        "ddp_spawn": Entry(
            "ddp:DDP",
            "ddp in processes that are spawned for one call of a script",
            launcher="spawn",
            max_nodes=1,
        ),
        "ddp_fork": _FORKED,
        "ddp_notebook": _FORKED,
        "ddp2": Entry("dp:DDP2"),
        "ddp_zero1": Entry("ddp_zero1:DDPZeRO1"),
    },
)
