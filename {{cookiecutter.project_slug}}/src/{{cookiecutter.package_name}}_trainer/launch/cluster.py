"""The rank of this process: read once from the environment, never guessed.

:data:`SOURCES` has the launches that are known; ``TRAINER_CLUSTER`` overrides their precedence. A
SLURM job id without a step means an interactive allocation or a batch script, not a launch.
"""

import os
import re
from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from ..errors import ConfigurationError, nearest, shown

OVERRIDE = "TRAINER_CLUSTER"
PLANNED = "TRAINER_WORLD_SIZE"  # set by a job's script: how many processes it starts
STORE = "TRAINER_STORE"  # set by our launcher on one node: path of the file store of its ranks
STORE_FILE = "store"
NODES = "nodes"
Environment = Mapping[str, str]
_MOST_PROCESSES = 2**20  # of a larger number, ranks would wait in vain
# Patterns of variables where a process trains alone: one node, and at most one host in JSON.
_USUAL = dict.fromkeys(("NUM_NODES", "NNODES", "PET_NNODES"), "1") | {"PALS_RANKID": ""}
_USUAL |= dict.fromkeys(("SM_HOSTS", "TF_CONFIG", "CLUSTER_SPEC"), r"[^[]*(\[[^],]*\][^[]*)?")
_NEEDED = "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
# Step ids that SLURM reserves for other steps than srun's: pending, extern, batch, interactive.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Layout:
    """The rank of this process, and the number of processes and nodes."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    main_address: str = "127.0.0.1"
    main_port: int = 0  # 0: rank 0 selects one, and publishes it in a file named by ``launch_id``
    source: str = "none"
    launch_id: str = ""  # identifies a launch on all its ranks, if it is not empty

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which prints, logs and names the run."""
        return self.rank == 0

    @property
    def started_outside(self) -> bool:
        """Whether an external launcher started this process as one of several ranks."""
        return self.source not in ("none", NODES)

    def receipt(self) -> str:
        """One line: the layout, its source, and how to override it."""
        main = f"main {self.main_address}:{self.main_port or 'to be chosen'}, "
        if self.num_nodes == 1 and self.main_port == 0:
            main = ""  # the ranks use a file store
        return (
            f"layout: {self.world_size} process{'es' * (self.world_size > 1)} on {self.num_nodes} "
            f"node{'s' * (self.num_nodes > 1)}, this one rank {self.rank} "
            f"(local {self.local_rank} of {self.local_world_size}), {main}"
            f"read from {self.source} ({OVERRIDE} overrides)"
        )


@dataclass(frozen=True)
class Source:
    """A kind of launch from which a layout can be read, tried in ascending ``precedence``.

    Launchers whose daemons start the ranks come before srun, whose variables their ranks inherit in
    a SLURM job. ``appended``: words added to each command line.
    """

    name: str
    precedence: int
    read: Callable[[Environment], Layout | None]  # ``None``: it has not started this process
    variables: Collection[str] = ()  # it is asked only where all are set
    appended: Callable[[Environment], Sequence[str]] = lambda environment: ()


def without_appended(words: Sequence[str]) -> list[str]:
    """A command line without the words that launchers append to it."""
    appended = {word for source in SOURCES for word in source.appended(os.environ)}
    return [word for word in words if word not in appended]


def detect(environment: Environment | None = None, num_nodes: int | None = None) -> Layout:
    """Detect this process' layout, or raise ConfigurationError; ``num_nodes``: the user's."""
    given = {"NNODES": str(num_nodes)} if isinstance(num_nodes, int) else {}  # or a variable's
    environment = {**given, **(os.environ if environment is None else environment)}
    chosen = environment.get(OVERRIDE)
    known = {source.name: source for source in SOURCES}
    if chosen is not None and chosen not in known:
        raise ConfigurationError(f"{OVERRIDE}={chosen}: no such source{nearest(chosen, known)}")
    for source in SOURCES if chosen is None else [known[chosen]]:
        if {*source.variables} <= environment.keys() and (layout := _read(source, environment)):
            return layout
    raise ConfigurationError(f"{OVERRIDE}={chosen}: its variables are not set here")


def _read(source: Source, environment: Environment) -> Layout | None:
    try:
        layout = source.read(environment)
    except KeyError as error:
        problem = f"{error.args[0]} is not set"
    except ValueError as error:
        problem = str(error)
    else:
        if layout is None or (
            0 <= layout.rank < layout.world_size <= _MOST_PROCESSES
            and 0 <= layout.local_rank < layout.local_world_size <= layout.world_size
            and 0 <= layout.node_rank < layout.num_nodes <= layout.world_size
        ):
            return layout
        problem = (
            f"rank {layout.rank} of {layout.world_size}, local rank {layout.local_rank} of "
            f"{layout.local_world_size}, node {layout.node_rank} of {layout.num_nodes} (counted "
            f"from 0) are impossible (at most {_MOST_PROCESSES} processes)"
        )
    advice = "the launch is broken; TRAINER_CLUSTER=none ignores it, and trains in this process"
    raise ConfigurationError(f"{source.name}: {problem}; {advice}")


def unused(layout: Layout, processes: int) -> list[str]:
    """A note on variables of a launch that gave no rank to this process, which starts so many."""
    usual = {"WORLD_SIZE": str(processes), "RANK": "", "LOCAL_RANK": "0?"} | _USUAL
    odd = [f"{n}={v}" for n, v in os.environ.items() if not re.fullmatch(usual.get(n, "(?s).*"), v)]
    is_alone = layout.source == "none" and OVERRIDE not in os.environ
    line = f"with no more than this, the process trains without others; {_NEEDED}, or NODE_RANK in"
    return [f"{', '.join(odd)}: {line} one per node, or unset it"] if odd and is_alone else []


def number(env: Environment, name: str, default: int | None = None) -> int:
    """The number in a variable; ``default``: if it is not set."""
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={shown(env[name])} is not a number") from None


@dataclass(frozen=True)
class Names:
    """Names of a launcher's variables; what concerns the node is computed if it is not set."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node_rank: str = ""
    num_nodes: str = ""


def read_named(
    env: Environment, source: str, names: Names, address: str = "127.0.0.1", launch_id: str = ""
) -> Layout:
    """Read a layout from a launcher's variables; ``MASTER_ADDR`` overrides ``address``."""
    required = (names.rank, names.world_size, names.local_rank, names.local_world_size)
    rank, world_size, local_rank, on_node = (number(env, name) for name in required)
    if on_node < 1:
        meaning = "the number of processes on this node, at least 1"
        raise ValueError(f"{names.local_world_size}={on_node}, but it is {meaning}")
    return Layout(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=on_node,
        node_rank=number(env, names.node_rank, rank // on_node),
        num_nodes=number(env, names.num_nodes, -(-world_size // on_node)),
        main_address=env.get("MASTER_ADDR", address),
        main_port=number(env, "MASTER_PORT", 0),
        source=source,
        launch_id=launch_id,
    )


def check_filled(layout: Layout) -> Layout:
    """Return the layout, or raise ConfigurationError if nodes are not filled one by one, equally.

    Only then are the variables of launchers such as mpirun sufficient.
    """
    on_node = layout.local_world_size
    first = layout.node_rank * on_node
    if (layout.num_nodes * on_node, first + layout.local_rank) != (layout.world_size, layout.rank):
        raise ConfigurationError(
            f"{layout.source}: rank {layout.rank} of {layout.world_size} is {layout.local_rank} of "
            f"{on_node} on its node, one of {layout.num_nodes}; start as many processes on each "
            "node, and fill one node after the other"
        )
    return layout


# --- RANK and WORLD_SIZE: torchelastic, our own launcher, Kubernetes -----------------------------

_RANKS = Names(
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
)
_COMMANDS = Names("NODE_RANK", "NUM_NODES", "LOCAL_RANK", "number of commands on this node")


def _environment(env: Environment) -> Layout | None:
    # As older Lightning starts its ranks. With a number of nodes, it is one command per node.
    is_older = {"NODE_RANK", "LOCAL_RANK"} <= env.keys()
    if is_older and not {"RANK", "NUM_NODES", "NNODES"} & env.keys():
        first = number(env, "NODE_RANK") * number(env, "LOCAL_WORLD_SIZE", 1)
        env = {**env, "RANK": str(first + number(env, "LOCAL_RANK"))}
    return _ranks(env, "environment") if {"RANK", "WORLD_SIZE"} <= env.keys() else None


def _ranks(env: Environment, source: str) -> Layout:
    is_alone = env["WORLD_SIZE"] == "1"  # then no rank has to be reached
    address = Layout.main_address if is_alone else env["MASTER_ADDR"]
    if not is_alone and number(env, "MASTER_PORT") == 0 and STORE not in env:
        raise ConfigurationError(f"{source}: MASTER_PORT is 0, so that no rank knows the port")
    node = {"GROUP_RANK": env["NODE_RANK"]} if "NODE_RANK" in env else {}
    defaults = {"LOCAL_RANK": "0", **node}
    if env.get("LOCAL_RANK", "0") == "0":  # else it is not the only one of its node
        defaults["LOCAL_WORLD_SIZE"] = "1"
    return read_named({**defaults, **env}, source, _RANKS, address)


def _nodes(env: Environment) -> Layout | None:
    """One command per node, started by the user; it starts the ranks of its node."""
    count = number(env, "NUM_NODES" if "NUM_NODES" in env else "NNODES", 0)
    if count == 1 or not ("NODE_RANK" in env or (count > 1 and "MASTER_ADDR" in env)):
        return None
    # Each command is the first process of its node.
    nodes = {"NUM_NODES": str(count)} if count > 1 else {}
    named = {"LOCAL_RANK": "0", _COMMANDS.local_world_size: "1", **env, **nodes}
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NUM_NODES"):
        if name not in named:
            raise ConfigurationError(
                f"nodes: {name} is not set; a command that is started once on each node needs "
                "NODE_RANK, MASTER_ADDR, MASTER_PORT and NUM_NODES (or num_nodes of the trainer); "
                f"{OVERRIDE}=none trains in this process alone"
            )
    if named["LOCAL_RANK"] != "0":
        problem = f"LOCAL_RANK={named['LOCAL_RANK']}, but neither RANK nor WORLD_SIZE"
        advice = "start the command once on each node without LOCAL_RANK, or set all three"
        raise ConfigurationError(f"nodes: {problem}; {advice} for each process")
    return read_named(named, NODES, _COMMANDS)


# --- srun ----------------------------------------------------------------------------------------

_STEP = Names(
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "number of tasks on this node"),
    *("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
)


def _srun(env: Environment) -> Layout | None:
    # A job alone may be an allocation or a script.
    if number(env, "SLURM_STEP_ID", _FIRST_RESERVED_STEP) >= _FIRST_RESERVED_STEP:
        return None
    node_rank = number(env, _STEP.node_rank)
    # Numbers of tasks, each with the number of nodes: "2(x3),1" is [(2, 3), (1, 1)].
    entries = re.findall(r"(\d+)(?:\(x(-?\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"])
    tasks = [(int(count), int(times or 1)) for count, times in entries]
    ends = list(accumulate((times for _, times in tasks), initial=0))
    if not 0 <= node_rank < ends[-1] == number(env, _STEP.num_nodes):
        raise ValueError(
            f"SLURM_NODEID={node_rank} of {env[_STEP.num_nodes]} nodes, but the step has "
            f"{ends[-1]} nodes (SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']})"
        )
    named = {**env, _STEP.local_world_size: str(tasks[bisect(ends, node_rank) - 1][0])}
    step = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    launch_id = ".".join(env.get(name, "0") for name in step)
    return read_named(named, "srun", _STEP, first_host(env["SLURM_STEP_NODELIST"]), launch_id)


def first_host(nodelist: str) -> str:
    """First name of a SLURM host list: ``"gpu[07-09,12],login1"`` is ``"gpu07"``."""
    prefix, ranges = re.findall(r"^([^\[,]*)(?:\[([^\]]*)\])?", nodelist)[0]
    return str(prefix + re.split(r"[-,]", ranges)[0])


# --- MPI: Open MPI's mpirun; hydra, the mpiexec of MPICH and Intel MPI; jsrun, of LSF ------------

# OMPI_COMM_WORLD_NODE_RANK is the rank within its node. Open MPI 5 sets no number of nodes.
_OPEN_MPI = Names(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    num_nodes="OMPI_MCA_orte_num_nodes",
)
_HYDRA = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_OF_HYDRA = "start the ranks with mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500"
_JSRUN = Names(*(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_OF_JSRUN = "start the ranks with jsrun -E MASTER_ADDR=HOST_OF_RANK_0 -E MASTER_PORT=29500"


def _open_mpi(env: Environment) -> Layout:
    # In Open MPI 4, the first is a small number that is reused; the second one is random.
    launch = (env["PMIX_NAMESPACE"], env.get("OMPI_MCA_orte_precondition_transports", ""))
    layout = read_named(env, "openmpi", _OPEN_MPI, launch_id="-".join(filter(None, launch)))
    if layout.num_nodes > 1 and "MASTER_ADDR" not in env:
        problem = f"{layout.num_nodes} nodes, but the address of rank 0 is unknown"
        command = "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        raise ConfigurationError(f"openmpi: {problem}; start them with {command}")
    return check_filled(layout)


def _unidentified(source: str, names: Names, advice: str, env: Environment) -> Layout:
    layout = check_filled(read_named(env, source, names))
    # Nothing else identifies a launch.
    if layout.world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        raise ConfigurationError(f"{source}: the address of rank 0 is unknown; {advice}")
    return layout


def _alone(env: Environment) -> Layout:
    odd = [f"{n}={env[n]}" for n in ("FLUX_JOB_SIZE", "PMI_SIZE") if env.get(n, "1") != "1"]
    if odd and OVERRIDE not in env:
        raise ConfigurationError(f"{', '.join(odd)}: the launcher is not known; {_NEEDED} process")
    return Layout()


SOURCES = [
    Source("torchelastic", 10, partial(_ranks, source="torchelastic"), ["TORCHELASTIC_RUN_ID"]),
    Source("openmpi", 30, _open_mpi, [_OPEN_MPI.rank]),
    Source("hydra", 40, partial(_unidentified, "hydra", _HYDRA, _OF_HYDRA), [_HYDRA.local_rank]),
    Source("jsrun", 45, partial(_unidentified, "jsrun", _JSRUN, _OF_JSRUN), [_JSRUN.rank]),
    Source("srun", 60, _srun),
    Source("environment", 70, _environment),
    Source(NODES, 80, _nodes),
    Source("none", 90, _alone),
]
