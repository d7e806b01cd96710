"""Check that the launch, the devices and the strategy are consistent."""

import os
from dataclasses import dataclass, field

from ..errors import ConfigurationError, Problems
from ..launch import cluster
from ..launch.cluster import Layout
from ..launch.devices import Accelerator, choose_accelerator
from ..options import Options
from ..strategies import Strategy
from . import device_choice


@dataclass(frozen=True)
class Placement:
    """Where a run will be: the devices of each node, by index, and the layout of processes."""

    accelerator: Accelerator = "cpu"
    layout: Layout = field(default_factory=Layout)
    devices: tuple[int, ...] = (0,)
    nodes: int = 1


def find(options: Options, problems: Problems) -> Placement:
    """Find where a run will be; ``problems`` collects one line per error."""
    accelerator: Accelerator = "cpu"
    with problems:
        accelerator = choose_accelerator(options.accelerator)
    layout = Layout()
    with problems:
        layout = cluster.detect(num_nodes=options.num_nodes)
        _check_port(layout)
    # If they are invalid: a number about which no other check reports an error.
    devices = list(range(layout.local_world_size if layout.started_outside else 1))
    with problems:
        devices = device_choice.choose(options, accelerator, layout)
    nodes = layout.num_nodes if layout.source != "none" else options.num_nodes or 1
    return Placement(accelerator, layout, tuple(devices), nodes)


def _check_port(layout: Layout) -> None:
    if not 0 <= layout.main_port < 2**16:
        raise ConfigurationError(
            f"{layout.source}: MASTER_PORT={layout.main_port}: give a port from 1 to 65535"
        )


def check(options: Options, placement: Placement, name: str, strategy: Strategy) -> list[str]:
    """One line for each way in which the launch does not fit a strategy.

    Args:
        options: The trainer's.
        placement: The run's.
        name: The strategy's name.
        strategy: The strategy.
    """
    layout, nodes, launched_by = placement.layout, options.num_nodes, strategy.limits.launched_by
    expected = strategy.limits.local_processes(len(placement.devices))
    lines = []
    if layout.source == cluster.NODES:
        lines += _other_nodes(options, expected, layout)
    elif layout.source == "none" and nodes is not None and nodes > 1:
        lines.append(
            f"num_nodes={nodes}: nothing has started this process on several nodes; start it with "
            "srun or torchrun, or once on each node with MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )
    if not layout.started_outside:
        if launched_by is not None and expected > 1:
            lines.append(f"strategy={name!r} on {expected} devices is started by {launched_by}")
        return lines
    if nodes is not None and nodes != layout.num_nodes:
        lines.append(f"num_nodes={nodes}, but {layout.source} started {layout.num_nodes}")
    if launched_by is not None and layout.source not in strategy.limits.sources:
        lines.append(
            f"strategy={name!r} is started by {launched_by}, not by {layout.source}; set "
            f"{cluster.OVERRIDE}=none to ignore it"
        )
    if expected != layout.local_world_size:
        lines.append(
            f"strategy={name!r} on devices={options.devices!r} needs {expected} processes per "
            "node, "
            f"but {layout.source} started {layout.local_world_size}; set {cluster.OVERRIDE}=none "
            "to ignore it"
        )
    return lines


def _other_nodes(options: Options, expected: int, layout: Layout) -> list[str]:
    """One line for each contradiction, if the command was started once per node."""
    nodes, ranks, lines = options.num_nodes, layout.num_nodes * expected, []
    if nodes is not None and nodes != layout.num_nodes:
        lines.append(f"num_nodes={nodes}, but NUM_NODES or NNODES is {layout.num_nodes}")
    size = os.environ.get("WORLD_SIZE", str(ranks))
    if size != str(ranks):
        lines.append(
            f"WORLD_SIZE={size}, but {layout.num_nodes} nodes of {expected} processes are {ranks}; "
            "unset it, or change devices"
        )
    return lines
