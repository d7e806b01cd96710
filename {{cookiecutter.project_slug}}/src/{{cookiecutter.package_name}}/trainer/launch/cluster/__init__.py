"""Who am I among the processes of this run? Read once from the environment, never guessed.

An explicit choice (``TRAINER_CLUSTER``) wins, then torchelastic, horovodrun, Open MPI's mpirun,
hydra (the mpiexec of MPICH and Intel MPI), deepspeed's launcher, an srun *step*, plain
``RANK``/``WORLD_SIZE`` variables (our own launcher, Kubernetes), ``NODE_RANK`` (this command,
started once on each node), and last alone. A SLURM job id without a step is an interactive
allocation or a batch script, not a launch: such a process is alone.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigurationError, nearest, one_line, shown

OVERRIDE = "TRAINER_CLUSTER"
# Set by our launcher on one node: the file of the store that its ranks share.
STORE = "TRAINER_STORE"
NODES = "nodes"
# Step ids that SLURM reserves for what is no srun step: pending, extern, batch, interactive.
_FIRST_RESERVED_STEP = 0xFFFFFFF0

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """This process' place among its peers.

    ``launch_id``: the same for all ranks of a launch and no other launch's; empty where there is
    none. ``main_port`` 0: rank 0 finds one and tells, by a file with ``launch_id`` in its name.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    main_address: str = "127.0.0.1"
    main_port: int = 0
    source: str = "none"
    launch_id: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for the run: it prints, logs and names the run."""
        return self.rank == 0

    @property
    def started_outside(self) -> bool:
        """Whether something has started this process as one of the ranks of a run."""
        return self.source not in ("none", NODES)

    def receipt(self) -> str:
        """One line: what was found, where, and how to say otherwise."""
        main = f"main {self.main_address}:{self.main_port or 'to be chosen'}, "
        if self.num_nodes == 1 and self.main_port == 0:
            main = ""  # they meet in a file
        return (
            f"layout: {self.world_size} process{'es' * (self.world_size > 1)} on {self.num_nodes} "
            f"node{'s' * (self.num_nodes > 1)}, this one rank {self.rank} "
            f"(local {self.local_rank} of {self.local_world_size}), {main}"
            f"read from {self.source} ({OVERRIDE} overrides)"
        )


def detect(environment: Environment | None = None, num_nodes: int | None = None) -> Layout:
    """Read this process' layout.

    Args:
        environment: variables to read; ``os.environ`` by default.
        num_nodes: what the user says elsewhere; counts where no variable says it.

    Raises:
        ConfigurationError: the override names no known source, or one whose variables are missing.
    """
    environment = os.environ if environment is None else environment
    if isinstance(num_nodes, int):
        environment = {"NNODES": str(num_nodes), **environment}
    chosen = environment.get(OVERRIDE)
    if chosen is not None:
        if chosen not in SOURCES:
            raise ConfigurationError(
                f"{OVERRIDE}={chosen}: no such source{nearest(chosen, SOURCES)}"
            )
        layout = _read(chosen, environment)
        if layout is None:
            raise ConfigurationError(f"{OVERRIDE}={chosen}: its variables are not set here")
        return layout
    for name in SOURCES:
        layout = _read(name, environment)
        if layout is not None:
            return layout
    raise AssertionError("the last source always answers")


def _read(name: str, environment: Environment) -> Layout | None:
    try:
        layout = SOURCES[name](environment)
    except KeyError as error:
        raise ConfigurationError(
            f"{name}: {error.args[0]} is not set; the launch is broken"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{name}: {_no_number(environment, error)}") from error
    if layout is not None:
        _check_ranks(layout)
    return layout


_NUMBERS = re.compile(
    r"(LOCAL_|GROUP_|NODE_|CROSS_|HOROVOD_\w*)?(RANK|WORLD_SIZE|SIZE|PORT)|MASTER_PORT"
    r"|OMPI_\w*(RANK|SIZE|num_nodes)|SLURM_(PROCID|LOCALID|NODEID|STEP_(ID|NUM_TASKS|NUM_NODES))"
)


def _no_number(environment: Environment, error: ValueError) -> str:
    """Which variables of a launch are no number."""
    wrong = [
        f"{name}={shown(value)}"
        for name, value in sorted(environment.items())
        if _NUMBERS.fullmatch(name) and not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value)
    ]
    return f"{' and '.join(wrong) or one_line(error)} is no number; the launch is broken"


def _check_ranks(layout: Layout) -> None:
    places = {
        "rank": (layout.rank, layout.world_size),
        "local rank": (layout.local_rank, layout.local_world_size),
        "node": (layout.node_rank, layout.num_nodes),
    }
    for name, (place, count) in places.items():
        if not 0 <= place < count:
            raise ConfigurationError(
                f"{layout.source}: {name} {place} of {count} (counted from 0) cannot be; "
                "the launch is broken"
            )


def _torchelastic(env: Environment) -> Layout | None:
    return _ranks(env, "torchelastic") if "TORCHELASTIC_RUN_ID" in env else None


def _environment(env: Environment) -> Layout | None:
    return _ranks(env, "environment") if {"RANK", "WORLD_SIZE"} <= env.keys() else None


def _ranks(env: Environment, source: str) -> Layout:
    world_size = int(env["WORLD_SIZE"])
    local_world_size = _size("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE", "1"))
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


def _size(name: str, value: str) -> int:
    if int(value) < 1:
        raise ConfigurationError(f"{name}={value}: this process is one of them; give at least 1")
    return int(value)


def _horovod(env: Environment) -> Layout | None:
    if "HOROVOD_RANK" not in env:
        return None
    num_nodes = int(env["HOROVOD_CROSS_SIZE"])
    # Where horovodrun itself listens: on rank 0's node, unless it was started from another.
    address, port = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    return _check_filled(
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


def _openmpi(env: Environment) -> Layout | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    rank, world_size = int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"])
    local_world_size = _size("OMPI_COMM_WORLD_LOCAL_SIZE", env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # Open MPI 5 no longer tells the number of nodes.
    num_nodes = int(env.get("OMPI_MCA_orte_num_nodes", world_size // local_world_size))
    if num_nodes > 1 and "MASTER_ADDR" not in env:
        raise ConfigurationError(
            f"openmpi: {num_nodes} nodes, but none knows where rank 0 is; start them with "
            "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        )
    # The first is a small number in Open MPI 4, which comes again; the second is random there.
    launch = (env["PMIX_NAMESPACE"], env.get("OMPI_MCA_orte_precondition_transports", ""))
    return _check_filled(
        Layout(
            rank=rank,
            local_rank=int(env["OMPI_COMM_WORLD_LOCAL_RANK"]),
            world_size=world_size,
            local_world_size=local_world_size,
            # OMPI_COMM_WORLD_NODE_RANK is this rank's place on its node, not the node's.
            node_rank=rank // local_world_size,
            num_nodes=num_nodes,
            main_address=env.get("MASTER_ADDR", "127.0.0.1"),
            main_port=int(env.get("MASTER_PORT", 0)),
            source="openmpi",
            launch_id="-".join(filter(None, launch)),
        )
    )


def _hydra(env: Environment) -> Layout | None:
    """The mpiexec of MPICH and Intel MPI. srun's PMI plugins set the first two variables, too."""
    if not {"PMI_RANK", "PMI_SIZE"} <= env.keys():
        return None
    if "MPI_LOCALRANKID" not in env and (_in_step(env) or env["PMI_SIZE"] == "1"):
        return None
    rank, world_size = int(env["PMI_RANK"]), int(env["PMI_SIZE"])
    local_rank = int(env["MPI_LOCALRANKID"])
    local_world_size = _size("MPI_LOCALNRANKS", env["MPI_LOCALNRANKS"])
    num_nodes = -(-world_size // local_world_size)
    launch = _hydra_proxy() if num_nodes == 1 and "MASTER_PORT" not in env else ""
    if launch is None or (num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= env.keys()):
        raise ConfigurationError(
            f"hydra: {num_nodes} node{'s' * (num_nodes > 1)}, but none knows where rank 0 is; "
            "start them with mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500"
        )
    return _check_filled(
        Layout(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            node_rank=rank // local_world_size,
            num_nodes=num_nodes,
            main_address=env.get("MASTER_ADDR", "127.0.0.1"),
            main_port=int(env.get("MASTER_PORT", 0)),
            source="hydra",
            launch_id=launch,
        )
    )


def _hydra_proxy() -> str | None:
    """Which proxy of hydra's has started this process: no variable tells launches apart."""
    process = os.getpid()
    while process > 1:
        try:
            # Source: man 5 proc_pid_stat; the name in parentheses may hold spaces.
            start, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        except OSError:
            return None
        fields = rest.split()
        if start.partition("(")[2] in ("hydra_pmi_proxy", "pmi_proxy"):
            return f"hydra-{socket.gethostname()}-{process}-{fields[19]}"
        process = int(fields[1])
    return None


def _deepspeed(env: Environment) -> Layout | None:
    if not {"CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "MASTER_ADDR"} <= env.keys():
        return None
    return _check_filled(
        Layout(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_world_size=_size("LOCAL_SIZE", env["LOCAL_SIZE"]),
            node_rank=int(env["CROSS_RANK"]),
            num_nodes=int(env["CROSS_SIZE"]),
            main_address=env["MASTER_ADDR"],
            main_port=int(env["MASTER_PORT"]),
            source="deepspeed",
        )
    )


def _check_filled(layout: Layout) -> Layout:
    """The layout, if nodes of equal size are filled one after the other.

    What horovodrun, mpirun and deepspeed tell of the nodes is right only then.
    """
    on_node = layout.local_world_size
    if (
        layout.world_size != layout.num_nodes * on_node
        or layout.rank != layout.node_rank * on_node + layout.local_rank
    ):
        raise ConfigurationError(
            f"{layout.source}: rank {layout.rank} of {layout.world_size} is {layout.local_rank} of "
            f"{on_node} on its node, one of {layout.num_nodes}; start as many processes on each "
            "node, and fill one node after the other"
        )
    return layout


def _in_step(env: Environment) -> bool:
    return int(env.get("SLURM_STEP_ID", _FIRST_RESERVED_STEP)) < _FIRST_RESERVED_STEP


def _srun(env: Environment) -> Layout | None:
    if not _in_step(env):
        return None
    node_rank = int(env["SLURM_NODEID"])
    tasks = _tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    if not 0 <= node_rank < len(tasks):
        raise ConfigurationError(
            f"srun: SLURM_NODEID={node_rank}, but the step has {len(tasks)} nodes "
            f"(SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}); the launch is broken"
        )
    step = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Layout(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=int(env["SLURM_STEP_NUM_NODES"]),
        main_address=env.get("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"])),
        main_port=int(env.get("MASTER_PORT", 0)),
        source="srun",
        launch_id=".".join(env.get(name, "0") for name in step),
    )


def _nodes(env: Environment) -> Layout | None:
    """This command, started once on each node: it starts its node's ranks, or is its only one."""
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
    node_rank, num_nodes = int(env["NODE_RANK"]), _size("NUM_NODES", str(count))
    return Layout(
        rank=node_rank,
        world_size=num_nodes,
        node_rank=node_rank,
        num_nodes=num_nodes,
        main_address=env["MASTER_ADDR"],
        main_port=int(env["MASTER_PORT"]),
        source=NODES,
    )


def _alone(env: Environment) -> Layout | None:
    return Layout()


# The first that answers. mpirun, mpiexec, horovodrun and deepspeed start their ranks from a daemon;
# in a SLURM job that is itself a task of a step, whose variables the ranks inherit: theirs must win
# over srun's.
SOURCES: dict[str, Callable[[Environment], Layout | None]] = {
    "torchelastic": _torchelastic,
    "horovod": _horovod,
    "openmpi": _openmpi,
    "hydra": _hydra,
    "deepspeed": _deepspeed,
    "srun": _srun,
    "environment": _environment,
    NODES: _nodes,
    "none": _alone,
}


def first_host(nodelist: str) -> str:
    """First name of a SLURM host list: ``"gpu[07-09,12],login1"`` is ``"gpu07"``."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?", nodelist)
    if match is None:
        return nodelist
    prefix, ranges = match.groups()
    return prefix + re.split(r"[-,]", ranges)[0] if ranges else prefix


def _tasks_per_node(text: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
