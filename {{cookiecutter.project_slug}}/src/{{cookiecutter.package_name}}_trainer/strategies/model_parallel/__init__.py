"""Model parallelism: pipelines, and meshes with tensor parallelism."""

from dataclasses import replace

from ..registry import Entry, Registration

_SEQUENTIAL = Entry(
    "pipeline.strategy:Sequential",
    lacks={
        "find_unused_parameters": "a pipeline needs none for parameters that a step does not use",
        "stages_per_process": "each process has one stage; leave it out",
    },
)
_MESH = Entry(
    "mesh.strategy:Mesh",
    lacks={
        "pipeline": "use strategy='sequential' and its stages, which keeps data parallelism",
        "context": "processes do not split sequences; for long ones use strategy='fsdp' with "
        "activation_checkpointing",
    },
)
REGISTRATION = Registration(
    {
        "sequential": _SEQUENTIAL,
        "pipeline": _SEQUENTIAL,
        "mesh": _MESH,
        "tensor_parallel": replace(
            _MESH,
            summary="layers sharded over all processes by the module's parallelize_plan",
            preset={"data": 1, "shard": 1, "tensor": -1},
            base="mesh",
        ),
    },
)
"""``pipeline`` is another name of ``sequential``, which is Lightning's."""
