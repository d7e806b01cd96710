"""The deepspeed launcher as a source of the layout."""

from ...launch.cluster import Environment, Layout, Names, Source, check_filled, read_named

_NAMES = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def _read(env: Environment) -> Layout | None:
    if not {"CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "MASTER_ADDR"} <= env.keys():
        return None
    return check_filled(read_named(env, "deepspeed", _NAMES))


def _appended(env: Environment) -> list[str]:
    """The option by which the launcher passes the local rank, which is also in a variable."""
    return [f"--local_rank={env.get('LOCAL_RANK')}"]


# After MPI, which the launcher can use to start ranks; before srun, whose step they inherit.
SOURCE = Source("deepspeed", 50, _read, _appended)
