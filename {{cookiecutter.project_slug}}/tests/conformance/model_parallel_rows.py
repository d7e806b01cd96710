"""Rows of pipelines, tensor parallelism and meshes."""

from .rows import IN_UNITS, NO_SPARSE, PROPERTIES, SMALL_UNITS, Launch, Portable, Row, more

FAMILY = "model_parallel"
# The other subjects have no ``sequential_module``.
REFUSED = {
    **dict.fromkeys(
        ("manual", "sparse", "sparse, clipped", "sparse, manual"),
        "a pipeline divides the children of self.sequential_module",
    ),
    **dict.fromkeys(("experts", "experts, clipped"), "a pipeline needs none for parameters"),
    "fp16": "each stage would have to skip the same steps",
    "sync batchnorm": "a stage normalizes micro-batches",
}
# A pipeline normalizes micro-batches, and its processes read the same batches.
ONLY = tuple(way for way in PROPERTIES if way not in ("batchnorm", "uneven"))
# What needs as many replicas as devices.
MESHED = tuple(way for way in PROPERTIES if way != "uneven" and "batchnorm" not in way)
NO_UNITS = dict.fromkeys(
    ("experts", "experts, clipped"), "find_unused_parameters is not supported with tensor"
)


ROWS = {
    "sequential": Row((Launch(2), more(4)), refused=REFUSED, only=ONLY),
    "pipeline": Row((Launch(2, slow=True),), only=("sgd",), is_alias=True),
    "tensor_parallel": Row(
        (Launch(2), more(4)), tolerances=IN_UNITS, refused={**NO_SPARSE, **NO_UNITS}, only=MESHED
    ),
    "mesh": Row(
        (Launch(2, slow=True), more(4)),
        options={**SMALL_UNITS, "data": 1, "shard": -1, "tensor": 2},
        tolerances=IN_UNITS,
        refused={**NO_SPARSE, **NO_UNITS},
        only=MESHED,
    ),
    "mesh, replicas": Row(
        (more(4),),
        "mesh",
        {"tensor": 2},
        tolerances=IN_UNITS,
        refused={**NO_SPARSE, **NO_UNITS},
        only=MESHED,
    ),
    "mesh, replicas in units": Row(
        (more(4),),
        "mesh",
        {"tensor": 2, **SMALL_UNITS},
        tolerances=IN_UNITS,
        refused={**NO_SPARSE, **NO_UNITS},
        only=MESHED,
        weekly=True,
    ),
}

PORTABLE = {
    "sequential": Portable(Launch(2), Launch(3)),
    "tensor_parallel": Portable(),
    "mesh": Portable(Launch(4), Launch(2)),
}
