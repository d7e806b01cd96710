"""The deepspeed launcher as a source of the layout."""

from ...launch.cluster import Environment, Layout, Names, check_filled, read_named

_NAMES = Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def read(env: Environment) -> Layout:
    """Read the layout from the variables of the launcher."""
    return check_filled(read_named(env, "deepspeed", _NAMES))
