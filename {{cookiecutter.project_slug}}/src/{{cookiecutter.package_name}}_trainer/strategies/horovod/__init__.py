"""The Horovod engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ..registration import Entry, Registration
from .cluster import SOURCE

REGISTRATION = Registration(
    {
        "horovod": Entry(
            "horovod:Horovod",
            lacks={
                "find_unused_parameters": "it finds them without this option; leave the option out"
            },
        )
    },
    cluster_sources=[SOURCE],
    lost_peer_errors=["HorovodInternalError"],
)
