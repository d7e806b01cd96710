"""The layout: rank and world size of a process; and the sources from which it can be read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import ConfigurationError

OVERRIDE = "TRAINER_CLUSTER"
# Set by our launcher on one node: path of the file store of its ranks.
STORE = "TRAINER_STORE"
STORE_FILE = "store"
NODES = "nodes"

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """The rank of this process, and the number of processes and nodes.

    ``launch_id``: identifies a launch on all its ranks; may be empty. ``main_port`` 0: rank 0
    selects a port and publishes it in a file with ``launch_id`` in its name.
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
    """A kind of launch from which a layout can be read.

    Args:
        name: Its name in :data:`OVERRIDE`.
        precedence: Sources are tried in ascending order. torchelastic has 10, Open MPI 30, hydra
            40, srun 60, plain variables 70, one command per node 80, a single process 90.
            Launchers that start their ranks from a daemon come before srun: in a SLURM job, the
            daemon is itself a task of a step, whose variables the ranks inherit.
        read: Reads the layout; returns ``None`` if this launch has not started the process.
        appended: Words that the launcher appends to the command line of each process.
    """

    name: str
    precedence: int
    read: Callable[[Environment], Layout | None]
    appended: Callable[[Environment], Sequence[str]] = lambda environment: ()


def read_size(name: str, value: str) -> int:
    """Read a number of processes or nodes, which includes this one.

    Raises:
        ConfigurationError: It is less than 1.
    """
    if int(value) < 1:
        raise ConfigurationError(f"{name}={value}: this process is one of them; give at least 1")
    return int(value)


def check_filled(layout: Layout) -> Layout:
    """Return the layout if nodes of equal size are filled one after the other.

    Only then are the variables of launchers such as mpirun sufficient.

    Raises:
        ConfigurationError: They are not.
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
