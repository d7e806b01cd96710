"""Whether a launch, the devices and the strategy fit together."""

import os
from typing import Any

from ..errors import Problems
from ..launch import cluster
from ..launch.cluster import Layout
from ..strategies import Strategy


def check(
    given: dict[str, Any],
    name: str,
    strategy: Strategy,
    device_count: int,
    layout: Layout,
    problems: Problems,
) -> None:
    """Check that what has started this process has started what the strategy wants.

    Args:
        given: a trainer's arguments, by name.
        name: of the strategy.
        strategy: itself.
        device_count: devices of this node.
        layout: of the processes.
        problems: takes a line for every contradiction.
    """
    nodes, launched_by = given["num_nodes"], strategy.limits.launched_by
    expected = strategy.local_processes(device_count)
    if layout.source == cluster.NODES:
        _check_nodes(given, expected, layout, problems)
    elif layout.source == "none" and nodes is not None and nodes > 1:
        problems.add(
            f"num_nodes={nodes}: nothing has started this process on several nodes; start it with "
            "srun or torchrun, or once on each node with MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )
    if not layout.started_outside:
        if launched_by is not None and expected > 1:
            problems.add(f"strategy={name!r} on {expected} devices is started by {launched_by}")
        return
    if nodes is not None and nodes != layout.num_nodes:
        problems.add(f"num_nodes={nodes}, but {layout.source} started {layout.num_nodes}")
    if launched_by is not None and layout.source not in strategy.limits.sources:
        problems.add(
            f"strategy={name!r} is started by {launched_by}, not by {layout.source}; set "
            f"{cluster.OVERRIDE}=none to ignore it"
        )
    if expected != layout.local_world_size:
        problems.add(
            f"strategy={name!r} on devices={given['devices']!r} wants {expected} processes a node, "
            f"but {layout.source} started {layout.local_world_size}; set {cluster.OVERRIDE}=none "
            "to ignore it"
        )


def _check_nodes(given: dict[str, Any], expected: int, layout: Layout, problems: Problems) -> None:
    """Check what was started once on each node, and starts so many ranks there."""
    nodes, ranks = given["num_nodes"], layout.num_nodes * expected
    if nodes is not None and nodes != layout.num_nodes:
        problems.add(f"num_nodes={nodes}, but NUM_NODES or NNODES is {layout.num_nodes}")
    told = os.environ.get("WORLD_SIZE", str(ranks))
    if told != str(ranks):
        problems.add(
            f"WORLD_SIZE={told}, but {layout.num_nodes} nodes of {expected} processes are {ranks}; "
            "unset it, or change devices"
        )
