"""Plain ``RANK`` and ``WORLD_SIZE`` variables, of our own launcher or Kubernetes."""

from ...errors import ConfigurationError
from .layout import STORE, Environment, Layout, Source, read_size


def _read(env: Environment) -> Layout | None:
    # As older Lightning starts its ranks. With a number of nodes, it is one command per node.
    is_older = {"NODE_RANK", "LOCAL_RANK"} <= env.keys()
    if is_older and not {"RANK", "NUM_NODES", "NNODES"} & env.keys():
        on_node = int(env.get("LOCAL_WORLD_SIZE", "1"))
        env = {**env, "RANK": str(int(env["NODE_RANK"]) * on_node + int(env["LOCAL_RANK"]))}
    return read_ranks(env, "environment") if {"RANK", "WORLD_SIZE"} <= env.keys() else None


def read_ranks(env: Environment, source: str) -> Layout:
    """Read the layout from ``RANK``, ``WORLD_SIZE`` and related variables."""
    world_size = int(env["WORLD_SIZE"])
    local_world_size = read_size("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE", "1"))
    layout = Layout(
        rank=int(env["RANK"]),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=int(
            env.get("GROUP_RANK", env.get("NODE_RANK", int(env["RANK"]) // local_world_size))
        ),
        num_nodes=int(env.get("GROUP_WORLD_SIZE", -(-world_size // local_world_size))),
        main_address=env["MASTER_ADDR"],
        main_port=int(env["MASTER_PORT"]),
        source=source,
    )
    if layout.main_port == 0 and STORE not in env:
        raise ConfigurationError(f"{source}: MASTER_PORT is 0, so that no rank knows the port")
    return layout


SOURCE = Source(
    "environment",
    70,
    _read,
    r"(LOCAL_|GROUP_|NODE_)?(RANK|WORLD_SIZE|SIZE|PORT)|MASTER_PORT",
)
