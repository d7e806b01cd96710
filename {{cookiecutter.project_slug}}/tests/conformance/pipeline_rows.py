"""Rows of pipeline parallelism; the other subjects have no ``sequential_module``."""

from .rows import PROPERTIES, Launch, Portable, Row, more

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

ROWS = {
    "sequential": Row((Launch(2), more(4)), refused=REFUSED, only=ONLY),
    "pipeline": Row((Launch(2, slow=True),), only=("sgd",), is_alias=True),
    "mesh, pipeline": Row(
        (more(4),),
        "mesh",
        {"data": 1, "shard": 2, "pipeline": 2},
        refused=REFUSED,
        only=tuple(way for way in ONLY if not way.startswith("experts")),
    ),
}

PORTABLE = {"sequential": Portable(Launch(2), Launch(3))}
