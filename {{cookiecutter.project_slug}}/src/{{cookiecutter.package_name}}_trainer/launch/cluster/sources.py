"""Where layouts are read: torchelastic, MPI, srun, plain variables, one command per node."""

import re
from collections.abc import Mapping
from itertools import accumulate

from ...errors import ConfigurationError
from .layout import NODES, OVERRIDE, STORE, Environment, Layout, Source, check_filled, read_size

# Step ids that SLURM reserves for other steps than srun's: pending, extern, batch, interactive.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


# --- RANK and WORLD_SIZE: torchelastic, our own launcher, Kubernetes -----------------------------


def _torchelastic(env: Environment) -> Layout | None:
    return _ranks(env, "torchelastic") if "TORCHELASTIC_RUN_ID" in env else None


def _environment(env: Environment) -> Layout | None:
    # As older Lightning starts its ranks. With a number of nodes, it is one command per node.
    is_older = {"NODE_RANK", "LOCAL_RANK"} <= env.keys()
    if is_older and not {"RANK", "NUM_NODES", "NNODES"} & env.keys():
        on_node = int(env.get("LOCAL_WORLD_SIZE", "1"))
        env = {**env, "RANK": str(int(env["NODE_RANK"]) * on_node + int(env["LOCAL_RANK"]))}
    return _ranks(env, "environment") if {"RANK", "WORLD_SIZE"} <= env.keys() else None


def _ranks(env: Environment, source: str) -> Layout:
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    on_node = read_size("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE", "1"))
    layout = Layout(
        rank=rank,
        local_rank=int(env.get("LOCAL_RANK", 0)),
        world_size=world_size,
        local_world_size=on_node,
        node_rank=int(env.get("GROUP_RANK", env.get("NODE_RANK", rank // on_node))),
        num_nodes=int(env.get("GROUP_WORLD_SIZE", -(-world_size // on_node))),
        main_address=env["MASTER_ADDR"],
        main_port=int(env["MASTER_PORT"]),
        source=source,
    )
    if layout.main_port == 0 and STORE not in env:
        raise ConfigurationError(f"{source}: MASTER_PORT is 0, so that no rank knows the port")
    return layout


def _nodes(env: Environment) -> Layout | None:
    """One command per node, started by the user; it starts the ranks of its node."""
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


# --- srun ----------------------------------------------------------------------------------------


def _in_step(env: Environment) -> bool:
    """Whether srun has started this process."""
    return int(env.get("SLURM_STEP_ID", _FIRST_RESERVED_STEP)) < _FIRST_RESERVED_STEP


def _srun(env: Environment) -> Layout | None:
    """An srun step; a SLURM job alone may be an allocation or a batch script."""
    if not _in_step(env):
        return None
    node_rank = int(env["SLURM_NODEID"])
    # Numbers of tasks, each with the number of nodes: "2(x3),1" is [(2, 3), (1, 1)].
    parts = [part.partition("(x") for part in env["SLURM_STEP_TASKS_PER_NODE"].split(",")]
    tasks = [(int(count), int(times.rstrip(")") or 1)) for count, _, times in parts]
    nodes, num_nodes = sum(times for _, times in tasks), int(env["SLURM_STEP_NUM_NODES"])
    if not 0 <= node_rank < nodes == num_nodes:
        raise ConfigurationError(
            f"srun: SLURM_NODEID={node_rank} of {num_nodes} nodes, but the step has {nodes} nodes "
            f"(SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}); the launch is broken"
        )
    ends = accumulate(times for _, times in tasks)
    step = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Layout(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_world_size=next(
            count for (count, _), end in zip(tasks, ends, strict=True) if node_rank < end
        ),
        node_rank=node_rank,
        num_nodes=num_nodes,
        main_address=env.get("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"])),
        main_port=int(env.get("MASTER_PORT", 0)),
        source="srun",
        launch_id=".".join(env.get(name, "0") for name in step),
    )


def first_host(nodelist: str) -> str:
    """First name of a SLURM host list: ``"gpu[07-09,12],login1"`` is ``"gpu07"``."""
    prefix, ranges = re.findall(r"^([^\[,]*)(?:\[([^\]]*)\])?", nodelist)[0]
    return str(prefix + re.split(r"[-,]", ranges)[0])


# --- MPI: Open MPI's mpirun, and hydra, the mpiexec of MPICH and Intel MPI -----------------------


def _open_mpi(env: Environment) -> Layout | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    # OMPI_COMM_WORLD_NODE_RANK is the rank within its node, not the node's rank.
    ranks = {
        name: env[f"OMPI_COMM_WORLD_{name}"]
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    }
    on_node = read_size("OMPI_COMM_WORLD_LOCAL_SIZE", ranks["LOCAL_SIZE"])
    # Open MPI 5 no longer sets the number of nodes.
    num_nodes = int(env.get("OMPI_MCA_orte_num_nodes", int(ranks["SIZE"]) // on_node))
    if num_nodes > 1 and "MASTER_ADDR" not in env:
        raise ConfigurationError(
            f"openmpi: {num_nodes} nodes, but the address of rank 0 is unknown; start them with "
            "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        )
    # In Open MPI 4, the first is a small number that is reused; the second one is random.
    launch = (env["PMIX_NAMESPACE"], env.get("OMPI_MCA_orte_precondition_transports", ""))
    return _mpi(env, ranks, "openmpi", num_nodes, "-".join(filter(None, launch)))


def _hydra(env: Environment) -> Layout | None:
    # srun's PMI plugins set the first two variables too.
    if not {"PMI_RANK", "PMI_SIZE"} <= env.keys():
        return None
    if "MPI_LOCALRANKID" not in env and (_in_step(env) or env["PMI_SIZE"] == "1"):
        return None
    ranks = {
        "RANK": env["PMI_RANK"],
        "SIZE": env["PMI_SIZE"],
        "LOCAL_RANK": env["MPI_LOCALRANKID"],
        "LOCAL_SIZE": env["MPI_LOCALNRANKS"],
    }
    num_nodes = -(-int(ranks["SIZE"]) // read_size("MPI_LOCALNRANKS", ranks["LOCAL_SIZE"]))
    if not {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():  # nothing else identifies a launch
        raise ConfigurationError(
            "hydra: the address of rank 0 is unknown; start the ranks with "
            "mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500"
        )
    return _mpi(env, ranks, "hydra", num_nodes)


def _mpi(
    env: Environment, ranks: Mapping[str, str], source: str, num_nodes: int, launch_id: str = ""
) -> Layout:
    rank, on_node = int(ranks["RANK"]), int(ranks["LOCAL_SIZE"])
    return check_filled(
        Layout(
            rank=rank,
            local_rank=int(ranks["LOCAL_RANK"]),
            world_size=int(ranks["SIZE"]),
            local_world_size=on_node,
            node_rank=rank // on_node,
            num_nodes=num_nodes,
            main_address=env.get("MASTER_ADDR", "127.0.0.1"),
            main_port=int(env.get("MASTER_PORT", 0)),
            source=source,
            launch_id=launch_id,
        )
    )


SOURCES = [
    Source("torchelastic", 10, _torchelastic),
    Source("openmpi", 30, _open_mpi),
    Source("hydra", 40, _hydra),
    Source("srun", 60, _srun),
    Source("environment", 70, _environment),
    Source(NODES, 80, _nodes),
    Source("none", 90, lambda environment: Layout()),
]
