"""An srun step; a SLURM job alone may be an allocation or a batch script."""

import re
from itertools import accumulate

from ...errors import ConfigurationError
from .layout import Environment, Layout, Source

# Step ids that SLURM reserves for other steps than srun's: pending, extern, batch, interactive.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def in_step(env: Environment) -> bool:
    """Whether srun has started this process."""
    return int(env.get("SLURM_STEP_ID", _FIRST_RESERVED_STEP)) < _FIRST_RESERVED_STEP


def _read(env: Environment) -> Layout | None:
    if not in_step(env):
        return None
    node_rank = int(env["SLURM_NODEID"])
    tasks = _tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    nodes, num_nodes = sum(times for _, times in tasks), int(env["SLURM_STEP_NUM_NODES"])
    if not 0 <= node_rank < nodes == num_nodes:
        raise ConfigurationError(
            f"srun: SLURM_NODEID={node_rank} of {num_nodes} nodes, but the step has {nodes} nodes "
            f"(SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']}); the launch is broken"
        )
    ends = accumulate(times for _, times in tasks)
    own = next(count for (count, _), end in zip(tasks, ends, strict=True) if node_rank < end)
    step = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Layout(
        rank=int(env["SLURM_PROCID"]),
        local_rank=int(env["SLURM_LOCALID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_world_size=own,
        node_rank=node_rank,
        num_nodes=num_nodes,
        main_address=env.get("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"])),
        main_port=int(env.get("MASTER_PORT", 0)),
        source="srun",
        launch_id=".".join(env.get(name, "0") for name in step),
    )


def first_host(nodelist: str) -> str:
    """First name of a SLURM host list: ``"gpu[07-09,12],login1"`` is ``"gpu07"``."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?", nodelist)
    if match is None:
        return nodelist
    prefix, ranges = match.groups()
    return prefix + re.split(r"[-,]", ranges)[0] if ranges else prefix


def _tasks_per_node(text: str) -> list[tuple[int, int]]:
    """Numbers of tasks, each with the number of nodes: ``"2(x3),1"`` is ``[(2, 3), (1, 1)]``."""
    parts = [part.partition("(x") for part in text.split(",")]
    return [(int(count), int(times.rstrip(")") or 1)) for count, _, times in parts]


SOURCE = Source("srun", 60, _read, "SLURM_(PROCID|LOCALID|NODEID|STEP_(ID|NUM_TASKS|NUM_NODES))")
