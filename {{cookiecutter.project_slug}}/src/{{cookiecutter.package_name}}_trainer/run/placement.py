"""Where a run will be, and with which strategy: accelerator, devices, layout of the processes."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import launch, strategies
from ..errors import ConfigurationError, Problems
from ..launch import cluster
from ..launch.cluster import Layout
from ..launch.devices import (
    ADDED,
    Accelerator,
    choose_accelerator,
    count,
    idle_gpus,
    parse_devices,
)
from ..options import Options
from ..strategies import Limits, SingleDevice, Strategy
from .environment import GPUS


@dataclass(frozen=True)
class Placement:
    """Where a run will be: the devices of each node, by index, and the layout of processes."""

    accelerator: Accelerator = "cpu"
    layout: Layout = field(default_factory=Layout)
    devices: tuple[int, ...] = (0,)
    nodes: int = 1

    @property
    def torch_devices(self) -> tuple[torch.device, ...]:
        """The devices of this node, as visible to this process."""
        return tuple(torch_device(self.accelerator, index) for index in self.devices)


def find(options: Options, problems: Problems) -> Placement:
    """Find where a run will be; ``problems`` collects one line per error."""
    accelerator: Accelerator = "cpu"
    with problems:
        accelerator = choose_accelerator(options.accelerator)
    layout = Layout()
    with problems:
        layout = cluster.detect(num_nodes=options.num_nodes)
        if not 0 <= layout.main_port < 2**16:
            raise ConfigurationError(
                f"{layout.source}: MASTER_PORT={layout.main_port}: give a port from 1 to 65535"
            )
    # If they are invalid: a number about which no other check reports an error.
    devices = list(range(layout.local_world_size if layout.started_outside else 1))
    with problems:
        devices = _devices(options, accelerator, layout)
    nodes = layout.num_nodes if layout.source != "none" else options.num_nodes or 1
    return Placement(accelerator, layout, tuple(devices), nodes)


def choose_strategy(
    options: Options, placement: Placement, problems: Problems
) -> tuple[str, Strategy]:
    """Select a strategy; ``problems`` collects one line per error.

    Returns:
        Its name, and the strategy.
    """
    wanted, own_options = options.strategy, options.strategy_options or {}
    if isinstance(wanted, Strategy):
        if own_options:
            problems.add("strategy_options belong to a strategy's name; this one is already made")
        return type(wanted).__name__, wanted
    layout = placement.layout
    # single_device has no options; those of ddp are kept if an elastic run shrinks to one process.
    is_ddp = bool(own_options) or max(len(placement.devices), layout.world_size) > 1
    default = "ddp" if is_ddp else "single_device"
    if placement.accelerator in ADDED:
        default = ADDED[placement.accelerator].strategy
    if isinstance(wanted, str) and wanted == "auto":
        in_notebook = launch.is_interactive() and not layout.started_outside
        wanted = "ddp_notebook" if default == "ddp" and in_notebook else default
    with problems:
        strategy = strategies.create(wanted, own_options)
        return str(wanted), strategy
    # One that causes no other errors, so that only the name is reported.
    return default, strategies.create(default, {})


def check(options: Options, placement: Placement, name: str, strategy: Strategy) -> list[str]:
    """One line for each way in which the launch does not fit a strategy.

    Args:
        options: The trainer's.
        placement: The run's.
        name: The strategy's name.
        strategy: The strategy.
    """
    layout, nodes, launched_by = placement.layout, options.num_nodes, strategy.limits.launched_by
    expected, lines = strategy.local_processes(len(placement.devices)), []
    ignored = f"set {cluster.OVERRIDE}=none to ignore it"
    if layout.source == "none" and nodes is not None and nodes > 1:
        lines.append(
            f"num_nodes={nodes}: nothing has started this process on several nodes; start it with "
            "srun or torchrun, or once on each node with MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )
    elif layout.source != "none" and nodes not in (None, layout.num_nodes):
        is_by_node = layout.source == cluster.NODES
        says = "NUM_NODES or NNODES is" if is_by_node else f"{layout.source} started"
        lines.append(f"num_nodes={nodes}, but {says} {layout.num_nodes}")
    if layout.source == cluster.NODES:
        ranks = str(layout.num_nodes * expected)
        if (size := os.environ.get("WORLD_SIZE", ranks)) != ranks:
            lines.append(
                f"WORLD_SIZE={size}, but {layout.num_nodes} nodes of {expected} processes are "
                f"{ranks}; unset it, or change devices"
            )
    if not layout.started_outside:
        if launched_by is not None and expected > 1:
            lines.append(f"strategy={name!r} on {expected} devices is started by {launched_by}")
        return lines
    if launched_by is not None and layout.source not in strategy.limits.sources:
        lines.append(
            f"strategy={name!r} is started by {launched_by}, not by {layout.source}; {ignored}"
        )
    if expected != layout.local_world_size:
        lines.append(
            f"strategy={name!r} on devices={options.devices!r} needs {expected} processes per "
            f"node, but {layout.source} started {layout.local_world_size}; {ignored}"
        )
    return lines


# --- devices -------------------------------------------------------------------------------------


def torch_device(accelerator: Accelerator, index: int) -> torch.device:
    """A device of this node, as visible to this process."""
    if accelerator == "cpu":
        return torch.device("cpu")
    if accelerator in ADDED:
        return torch.device(ADDED[accelerator].device_type, index)
    # A cluster may show each process only its own GPU (srun --gpus-per-task=1), as device 0.
    return torch.device(accelerator, index if index < (count(accelerator) or 0) else 0)


def pass_to_ranks(gpus: Sequence[torch.device]) -> None:
    """Make copies of this command, which are about to start, use the GPUs selected here."""
    os.environ[GPUS] = ",".join(str(each.index) for each in gpus)


def _devices(options: Options, accelerator: Accelerator, layout: Layout) -> list[int]:
    """Indices of the devices to use on this node.

    Raises:
        ConfigurationError: There are no such devices, or fewer GPUs than processes.
    """
    value: Any = options.devices
    available = count(accelerator)
    selects = options.auto_select_gpus and accelerator == "cuda"
    if layout.started_outside:
        limits, drives_all = _of_strategy(options.strategy)
        _check_processes(layout, selects, None if drives_all else available)
        # Such a launcher decides how many processes there are, whatever devices says.
        if limits.launched_by is not None or (value == "auto" and not drives_all):
            return list(range(layout.local_world_size))
        is_number = not isinstance(value, list) and "," not in str(value)
        if available == 1 and is_number:
            available = layout.local_world_size
    if selects and str(value).isdigit() and value not in (0, "0"):
        if launch.is_reported() and GPUS in os.environ:  # selected by our launcher
            return [int(index) for index in os.environ[GPUS].split(",")]
        return idle_gpus.choose(idle_gpus.read_gpus(), int(value))
    return parse_devices(value, available)


def _check_processes(layout: Layout, selects: bool, available: int | None) -> None:
    """Check the number of processes that a launcher has started on this node.

    Raises:
        ConfigurationError: Each would select GPUs by itself, or there are fewer GPUs.
    """
    processes = layout.local_world_size
    if selects and processes > 1 and not launch.is_reported():
        raise ConfigurationError(
            f"auto_select_gpus: {layout.source} started {processes} processes on this node, each "
            "of which would choose by itself; name the GPUs in CUDA_VISIBLE_DEVICES, or leave it "
            "to this command to start the processes"
        )
    # A process that sees one GPU may see its own: the ranks compare GPUs after they have joined.
    if available is not None and processes > available != 1:
        raise ConfigurationError(
            f"{layout.source} started {processes} processes on this node, which has {available} "
            f"GPUs for them: start {available}, or set accelerator='cpu'"
        )


def _of_strategy(wanted: object) -> tuple[Limits, bool]:
    """Limits of a strategy that may not exist, and whether one process drives all devices."""
    cls: type[Strategy] = SingleDevice
    limits = cls.limits
    if isinstance(wanted, Strategy):
        cls, limits = type(wanted), wanted.limits
    else:
        with contextlib.suppress(ConfigurationError):  # an unknown name is reported with the rest
            found = strategies.find(wanted)
            cls, limits = found.cls, found.limits
    return limits, cls.local_processes(2) == 1 and cls is not SingleDevice
