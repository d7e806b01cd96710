"""One command per node, started by the user; it starts the ranks of its node."""

from ...errors import ConfigurationError
from .layout import NODES, OVERRIDE, Environment, Layout, Source, read_size


def _read(env: Environment) -> Layout | None:
    count = next((env[name] for name in ("NUM_NODES", "NNODES") if name in env), None)
    several = count is not None and int(count) > 1
    if count == "1" or not ("NODE_RANK" in env or (several and "MASTER_ADDR" in env)):
        return None
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NUM_NODES"):
        if name not in env and not (name == "NUM_NODES" and several):
            raise ConfigurationError(
                f"nodes: {name} is not set; a command that is started once on each node needs "
                "NODE_RANK, MASTER_ADDR, MASTER_PORT and NUM_NODES (or num_nodes of the trainer); "
                f"set {OVERRIDE}=none to ignore them"
            )
    if env.get("LOCAL_RANK", "0") != "0":
        raise ConfigurationError(
            f"nodes: LOCAL_RANK={env['LOCAL_RANK']}, but neither RANK nor WORLD_SIZE; start the "
            "command once on each node without LOCAL_RANK, or set all three for each process"
        )
    node_rank, num_nodes = int(env["NODE_RANK"]), read_size("NUM_NODES", str(count))
    return Layout(
        rank=node_rank,
        world_size=num_nodes,
        node_rank=node_rank,
        num_nodes=num_nodes,
        main_address=env["MASTER_ADDR"],
        main_port=int(env["MASTER_PORT"]),
        source=NODES,
    )


SOURCE = Source(NODES, 80, _read, "NNODES|NUM_NODES|NODE_RANK")
