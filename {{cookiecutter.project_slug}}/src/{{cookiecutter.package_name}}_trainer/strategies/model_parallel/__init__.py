"""Model parallelism: pipelines, and meshes with tensor and context parallelism.

It imports from ``strategies/``, ``gradients/`` and ``fsdp/``, and from the floors below.
"""

from ..registration import Entry, Registration

REGISTRATION = Registration(
    {
        "sequential": Entry("pipeline.strategy:Sequential"),
        "pipeline": Entry("pipeline.strategy:Sequential"),
        "mesh": Entry("mesh.strategy:Mesh"),
        "tensor_parallel": Entry(
            "mesh.strategy:Mesh",
            "layers sharded over all processes by the module's parallelize_plan",
            preset={"data": 1, "shard": 1, "tensor": -1},
            base="mesh",
        ),
    },
)
"""``pipeline`` is another name of ``sequential``, which is Lightning's."""
