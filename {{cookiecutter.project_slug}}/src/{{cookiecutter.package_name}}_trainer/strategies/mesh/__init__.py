"""Device meshes: tensor, context and pipeline parallelism, with replicas and shards around them.

It imports from ``strategies/``, ``gradients/``, ``fsdp/`` and ``pipeline/``, and from the floors
below.
"""

from ..registration import Entry, Registration

REGISTRATION = Registration(
    {
        "mesh": Entry("strategy:Mesh"),
        "tensor_parallel": Entry(
            "strategy:Mesh",
            "layers sharded over all processes by the module's parallelize_plan",
            preset={"data": 1, "shard": 1, "tensor": -1},
            base="mesh",
        ),
    },
)
