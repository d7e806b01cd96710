"""horovodrun as a source of the layout."""

from ...launch.cluster import Environment, Layout, Source, check_filled


def _read(env: Environment) -> Layout | None:
    if "HOROVOD_RANK" not in env:
        return None
    num_nodes = int(env["HOROVOD_CROSS_SIZE"])
    # The address of horovodrun: rank 0's node, unless it was started on another one.
    address, port = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    return check_filled(
        Layout(
            rank=int(env["HOROVOD_RANK"]),
            local_rank=int(env["HOROVOD_LOCAL_RANK"]),
            world_size=int(env["HOROVOD_SIZE"]),
            local_world_size=int(env["HOROVOD_LOCAL_SIZE"]),
            node_rank=int(env["HOROVOD_CROSS_RANK"]),
            num_nodes=num_nodes,
            main_address=env.get("MASTER_ADDR", address if num_nodes > 1 else "127.0.0.1"),
            main_port=int(env.get("MASTER_PORT", 0)),
            source="horovod",
            launch_id=f"{address}-{port}",
        )
    )


# After torchelastic, before Open MPI: horovodrun may start its ranks with mpirun.
SOURCE = Source("horovod", 20, _read)
