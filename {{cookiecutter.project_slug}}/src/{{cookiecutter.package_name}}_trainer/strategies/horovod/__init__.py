"""The Horovod engine. No file outside this folder names it; deleting the folder removes it."""

from ...launch.cluster import Environment, Layout, Names, Source, check_filled, number, read_named
from ..registry import Entry, Registration

_NAMES = Names(
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)
_LACKS = {"find_unused_parameters": "it finds them without this option; leave the option out"}


def _read(env: Environment) -> Layout:
    # The address of horovodrun: rank 0's node, unless it was started on another one.
    address, port = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    main = address if number(env, "HOROVOD_CROSS_SIZE") > 1 else "127.0.0.1"
    return check_filled(read_named(env, "horovod", _NAMES, main, f"{address}-{port}"))


REGISTRATION = Registration(
    {"horovod": Entry("horovod:Horovod", lacks=_LACKS)},
    # After torchelastic, before Open MPI: horovodrun may start its ranks with mpirun.
    cluster_sources=[Source("horovod", 20, _read, variables=["HOROVOD_RANK"])],
    lost_peer_errors=["HorovodInternalError"],
)
