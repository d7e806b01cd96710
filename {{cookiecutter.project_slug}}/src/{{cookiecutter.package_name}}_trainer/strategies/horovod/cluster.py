"""horovodrun as a source of the layout."""

from ...launch.cluster import Environment, Layout, Names, check_filled, read_named

_NAMES = Names(
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)


def read(env: Environment) -> Layout:
    """Read the layout from the variables of horovodrun."""
    # The address of horovodrun: rank 0's node, unless it was started on another one.
    address, port = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    main = address if int(env["HOROVOD_CROSS_SIZE"]) > 1 else "127.0.0.1"
    return check_filled(read_named(env, "horovod", _NAMES, main, f"{address}-{port}"))
