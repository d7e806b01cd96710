"""horovodrun as a source of the layout."""

from ...launch.cluster import Environment, Layout, Names, Source, check_filled, read_named

_NAMES = Names(
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)


def _read(env: Environment) -> Layout | None:
    if _NAMES.rank not in env:
        return None
    # The address of horovodrun: rank 0's node, unless it was started on another one.
    address, port = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    main = address if int(env["HOROVOD_CROSS_SIZE"]) > 1 else "127.0.0.1"
    return check_filled(read_named(env, "horovod", _NAMES, main, f"{address}-{port}"))


# After torchelastic, before Open MPI: horovodrun may start its ranks with mpirun.
SOURCE = Source("horovod", 20, _read)
