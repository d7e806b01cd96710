"""The Horovod engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ...launch.cluster import Environment, Layout, Source
from ..registration import Entry, Registration


def _read(env: Environment) -> Layout:
    from .cluster import read

    return read(env)


REGISTRATION = Registration(
    {
        "horovod": Entry(
            "horovod:Horovod",
            lacks={
                "find_unused_parameters": "it finds them without this option; leave the option out"
            },
        )
    },
    # After torchelastic, before Open MPI: horovodrun may start its ranks with mpirun.
    cluster_sources=[Source("horovod", 20, _read, variables=["HOROVOD_RANK"])],
    lost_peer_errors=["HorovodInternalError"],
)
