"""Where a run will be, and with which strategy: accelerator, devices, layout of the processes."""

import os
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import strategies
from ..errors import ConfigurationError, Problems
from ..launch import cluster, rank, reports
from ..launch.cluster import Layout
from ..launch.devices import ENGINE_HARDWARE, Accelerator, choose_accelerator, count, parse_devices
from ..options import Options
from ..strategies import SingleDevice, Strategy
from .environment import GPUS


@dataclass(frozen=True)
class Placement:
    """Where a run will be: the devices of each node, by index, the processes, and the strategy."""

    accelerator: Accelerator
    layout: Layout
    devices: tuple[int, ...]
    nodes: int
    name: str  # of the strategy
    strategy: Strategy
    is_here: bool = True  # this machine, whose interfaces and programs are checked, too
    is_counted: bool = True  # the number of devices is known

    @property
    def torch_devices(self) -> tuple[torch.device, ...]:
        """The devices of this node, as visible to this process."""
        kind, hardware = self.accelerator, ENGINE_HARDWARE.get(self.accelerator)
        if kind == "cpu":
            return (torch.device(kind),) * len(self.devices)
        if hardware is not None:
            return tuple(torch.device(hardware.device_type, index) for index in self.devices)
        # A cluster may show each process only its own GPU (srun --gpus-per-task=1), as device 0.
        visible = count(kind) or 0
        return tuple(torch.device(kind, index if index < visible else 0) for index in self.devices)


def find(options: Options, problems: Problems, is_here: bool = True) -> Placement:
    """Find where a run will be; ``problems`` collects one line per error.

    ``is_here``: whether this process is one of the run, so that it reads how it was launched.
    """
    accelerator: Accelerator = "cpu"
    with problems:
        accelerator = choose_accelerator(options.accelerator)
    layout = Layout()
    with problems:
        if is_here:
            layout = cluster.detect(num_nodes=options.num_nodes)
        if not 0 <= layout.main_port < 2**16:
            port = f"MASTER_PORT={layout.main_port}"
            raise ConfigurationError(f"{layout.source}: {port}: give a port from 1 to 65535")
    own_options = options.strategy_options or {}
    is_auto = isinstance(options.strategy, str) and options.strategy == "auto"
    made: tuple[str, Strategy] | None = None
    if not is_auto:
        with problems:
            made = _create(options.strategy, own_options)
    # If they are invalid: a number about which no other check reports an error.
    devices = list(range(layout.local_world_size if layout.started_outside else 1))
    with problems:
        devices = _devices(options, accelerator, layout, made[1] if made else None)
    # single_device has no options; those of ddp are kept if an elastic run shrinks to one process.
    is_ddp = bool(own_options) or max(len(devices), layout.world_size, options.num_nodes or 1) > 1
    is_cell = is_ddp and rank.is_interactive() and not layout.started_outside
    auto = "ddp_notebook" if is_cell else "ddp" if is_ddp else "single_device"
    if accelerator in ENGINE_HARDWARE:
        auto = ENGINE_HARDWARE[accelerator].strategy
    if is_auto:
        with problems:
            made = _create(auto, own_options)
    name, strategy = made or _create(auto, {})  # in place of an invalid one: no other errors follow
    nodes = layout.num_nodes if layout.source != "none" else options.num_nodes or 1
    return Placement(accelerator, layout, tuple(devices), nodes, name, strategy)


def find_elsewhere(accelerator: Accelerator, options: Options, problems: Problems) -> Placement:
    """Find where a run on another machine will be: this one's CPUs stand for a node's devices.

    If the accelerator is ``auto``, it is one that the strategy runs on.
    """
    is_other = accelerator in ("auto", "cpu", "cuda", "gpu")
    on_cpus = replace(options, accelerator="cpu", auto_select_gpus=False) if is_other else options
    where = find(on_cpus, problems, is_here=False)
    if not is_other or accelerator in ENGINE_HARDWARE:
        return where
    limits, nodes = where.strategy.limits, where.nodes
    if accelerator != "cpu":
        able = "cuda" in limits.accelerators or accelerator != "auto"
        accelerator = "cuda" if able else limits.accelerators[0]
    own, source = limits.local_processes(len(where.devices)), next(iter(limits.sources), "plan")
    layout = Layout(world_size=own * nodes, local_world_size=own, num_nodes=nodes, source=source)
    where = replace(where, accelerator=accelerator, layout=layout)
    return replace(where, is_here=False, is_counted=str(options.devices) not in ("auto", "-1"))


def _create(wanted: object, own_options: dict[str, Any]) -> tuple[str, Strategy]:
    if not isinstance(wanted, Strategy):
        strategy = strategies.create(wanted, own_options)  # refuses what cannot be a text
        return str(wanted), strategy
    if own_options:
        problem = "strategy_options belong to a strategy's name"
        raise ConfigurationError(f"{problem}; this one is already made")
    return type(wanted).__name__, wanted


def _range(planned: str) -> range:
    """The numbers of processes that "N" or "MIN:MAX" says; empty for another text."""
    match = re.fullmatch("([0-9]{1,9})(?::([0-9]{1,9}))?", planned)
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


def check(options: Options, where: Placement) -> list[str]:
    """One line for each way in which the launch does not fit the strategy."""
    layout, nodes, limits = where.layout, options.num_nodes, where.strategy.limits
    expected, by = limits.local_processes(len(where.devices)), limits.launched_by
    source, is_ours, name = layout.source, not layout.started_outside, f"strategy={where.name!r}"
    is_by_node, ranks = source == cluster.NODES, str(layout.num_nodes * expected)
    size = os.environ.get("WORLD_SIZE", ranks)
    says = "NUM_NODES or NNODES is" if is_by_node else f"{source} started"
    ignored = f"where its variables are left of another launch, set {cluster.OVERRIDE}=none"
    right = f"leave out devices, or start {expected}; {ignored}"
    if reports.is_reported():
        other = f"the Trainer of this script with {layout.local_world_size} processes did"
        right = ignored = f"{other}: use strategy='ddp_spawn' for that one"
    planned = "" if reports.is_reported() else os.environ.get(cluster.PLANNED, "")
    advice = "see docs/trouble.md#processes-and-devices-do-not-match"
    lines = {
        f"{cluster.PLANNED}={planned} processes are started, but this one is one of "
        f"{layout.world_size}, read from {source}; {advice}": (
            planned and layout.world_size not in _range(planned)
        ),
        f"num_nodes={nodes}: nothing has started this process on several nodes; start it with srun "
        "or torchrun, or once on each node with MASTER_ADDR, MASTER_PORT and NODE_RANK": (
            source == "none" and nodes is not None and nodes > 1
        ),
        f"num_nodes={nodes}, but {says} {layout.num_nodes}": (
            source != "none" and nodes not in (None, layout.num_nodes)
        ),
        f"WORLD_SIZE={size}, but {layout.num_nodes} nodes of {expected} processes are {ranks}; "
        "unset it, or change devices": is_by_node and size != ranks,
        f"{name} on {expected} devices is started by {by}": is_ours and by and expected > 1,
        f"{name} is started by {by}, not by {source}; {ignored}": (
            by and not is_ours and source not in limits.sources
        ),
        f"{name} on devices={options.devices!r} needs {expected} processes per node, but {source} "
        f"started {layout.local_world_size}; {right}": (
            not is_ours and expected != layout.local_world_size
        ),
    }
    return [line for line, is_wrong in lines.items() if is_wrong]


def _devices(
    options: Options, accelerator: Accelerator, layout: Layout, strategy: Strategy | None
) -> list[int]:
    """Indices of the devices to use on this node; ``strategy``: ``None`` if it is not known yet."""
    value: Any = options.devices
    available, processes = count(accelerator), layout.local_world_size
    selects = options.auto_select_gpus and accelerator == "cuda"
    if layout.started_outside:
        if selects and processes > 1 and not reports.is_reported():
            raise ConfigurationError(
                f"auto_select_gpus: {layout.source} started {processes} processes on this node, "
                "each of which would choose by itself; name the GPUs in CUDA_VISIBLE_DEVICES"
            )
        limits = (SingleDevice() if strategy is None else strategy).limits
        # A process that sees one GPU may see its own: ranks compare GPUs after they have joined.
        if not limits.one_process_per_node and available is not None and processes > available != 1:
            raise ConfigurationError(
                f"{layout.source} started {processes} processes on this node, which has "
                f"{available} GPUs for them: start {available}, or set accelerator='cpu'"
            )
        # Such a launcher decides how many processes there are, whatever devices says.
        if limits.launched_by is not None or (value == "auto" and not limits.one_process_per_node):
            return list(range(processes))
        if available == 1 and not isinstance(value, list) and "," not in str(value):
            available = processes
    if selects and str(value).isdigit() and value not in (0, "0"):
        if reports.is_reported() and GPUS in os.environ:  # selected by our launcher
            return [int(index) for index in os.environ[GPUS].split(",")]
        from ..launch import idle_gpus

        return idle_gpus.choose_idle(idle_gpus.read_gpus(), int(value))
    return parse_devices(value, available)
