"""The deepspeed launcher as a source of the layout."""

from ...launch.cluster import Environment, Layout, Source, check_filled, read_size


def _read(env: Environment) -> Layout | None:
    if not {"CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "MASTER_ADDR"} <= env.keys():
        return None
    return check_filled(
        Layout(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_world_size=read_size("LOCAL_SIZE", env["LOCAL_SIZE"]),
            node_rank=int(env["CROSS_RANK"]),
            num_nodes=int(env["CROSS_SIZE"]),
            main_address=env["MASTER_ADDR"],
            main_port=int(env["MASTER_PORT"]),
            source="deepspeed",
        )
    )


def _appended(env: Environment) -> list[str]:
    """The option by which the launcher passes the local rank, which is also in a variable."""
    return [f"--local_rank={env.get('LOCAL_RANK')}"]


# After MPI, which the launcher can use to start ranks; before srun, whose step they inherit.
SOURCE = Source("deepspeed", 50, _read, _appended)
