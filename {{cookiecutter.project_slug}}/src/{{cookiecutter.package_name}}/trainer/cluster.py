"""Who am I among the processes of this run? Read once from the environment, never guessed.

An explicit choice (``TRAINER_CLUSTER``) wins, then torchelastic, then an srun *step*, then plain
``RANK``/``WORLD_SIZE`` variables (our own launcher, Kubernetes), then alone. A SLURM job id without
a step is an interactive allocation or a batch script, not a launch: such a process is alone.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import ConfigurationError, nearest

OVERRIDE = "TRAINER_CLUSTER"
# Step ids that SLURM reserves for what is no srun step: pending, extern, batch, interactive.
_FIRST_RESERVED_STEP = 0xFFFFFFF0

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """This process' place among its siblings. ``main_port`` 0: rank 0 finds one and tells."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    main_address: str = "127.0.0.1"
    main_port: int = 0
    source: str = "none"

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for the run: it prints, logs and names the run."""
        return self.rank == 0

    @property
    def started_outside(self) -> bool:
        """Whether something has started this process as one of a run."""
        return self.source != "none"

    def receipt(self) -> str:
        """One line: what was found, where, and how to say otherwise."""
        port = self.main_port or "to be chosen"
        return (
            f"layout: {self.world_size} process{'es' * (self.world_size > 1)} on {self.num_nodes} "
            f"node{'s' * (self.num_nodes > 1)}, this one rank {self.rank} "
            f"(local {self.local_rank} of {self.local_world_size}), main "
            f"{self.main_address}:{port}, read from {self.source} ({OVERRIDE} overrides)"
        )


def detect(environment: Environment | None = None) -> Layout:
    """Read this process' layout.

    Args:
        environment: variables to read; ``os.environ`` by default.

    Raises:
        ConfigurationError: the override names no known source, or one whose variables are missing.
    """
    environment = os.environ if environment is None else environment
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
        return SOURCES[name](environment)
    except KeyError as error:
        raise ConfigurationError(
            f"{name}: {error.args[0]} is not set; the launch is broken"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{name}: a variable is no number ({error})") from error


def _torchelastic(env: Environment) -> Layout | None:
    return _ranks(env, "torchelastic") if "TORCHELASTIC_RUN_ID" in env else None


def _environment(env: Environment) -> Layout | None:
    return _ranks(env, "environment") if {"RANK", "WORLD_SIZE"} <= env.keys() else None


def _ranks(env: Environment, source: str) -> Layout:
    world_size = int(env["WORLD_SIZE"])
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
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
    if layout.main_port == 0:
        raise ConfigurationError(f"{source}: MASTER_PORT is 0, so that no rank knows the port")
    return layout


def _srun(env: Environment) -> Layout | None:
    if int(env.get("SLURM_STEP_ID", _FIRST_RESERVED_STEP)) >= _FIRST_RESERVED_STEP:
        return None
    node_rank = int(env["SLURM_NODEID"])
    return Layout(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_world_size=_tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[node_rank],
        node_rank=node_rank,
        num_nodes=int(env["SLURM_STEP_NUM_NODES"]),
        main_address=env.get("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"])),
        main_port=int(env.get("MASTER_PORT", 0)),
        source="srun",
    )


def _alone(env: Environment) -> Layout | None:
    return Layout()


SOURCES: dict[str, Callable[[Environment], Layout | None]] = {
    "torchelastic": _torchelastic,
    "srun": _srun,
    "environment": _environment,
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
