"""What ``plan`` is asked for, and where it places a run: on devices that need not be here."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...cli import arguments
from ...errors import Problems, nearest, shown
from ...launch.cluster import Layout
from ...launch.devices import ADDED
from ...options import Options
from ...run.placement import Placement
from ...strategies import Strategy, registry

OWN = {
    "devices": "devices per node; default: trainer.devices",
    "num_nodes": "number of nodes; default: trainer.num_nodes, or 1",
    "memory": "memory of a device, such as 80G (of 2^30 bytes); on CPUs, that of a process",
    "accelerator": "gpu (default), cpu, or an engine's",
    "seconds": "time limit of each traced step; default: 120",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MOST = 2**20


@dataclass(frozen=True)
class Request:
    """The plan's own options; ``words`` are those of ``fit``, ``None`` stands for its options."""

    words: Sequence[str]
    as_json: bool
    devices: int | None
    num_nodes: int | None
    memory: int
    accelerator: str
    seconds: float


def read(words: Sequence[str], problems: Problems) -> Request:
    """Take the plan's own options from a command line; ``problems`` has a line per error."""
    given: dict[str, str] = {}
    rest = []
    for key, value in arguments.split([each for each in words if each != "--json"], problems):
        if key in OWN:
            given[key] = value
        elif value:
            rest.append(f"--{key}={value}")
        else:
            rest.append(f"--{key}")
    accelerator = {"gpu": "cuda"}.get(given.get("accelerator", "gpu"), given.get("accelerator", ""))
    if accelerator not in ("cuda", "cpu", *ADDED):
        known = nearest(accelerator, ["gpu", "cpu", *ADDED])
        problems.add(f"--accelerator {shown(given['accelerator'])} is unknown{known}")
    return Request(
        words=rest,
        as_json="--json" in words,
        devices=_number("devices", given, problems),
        num_nodes=_number("num_nodes", given, problems),
        memory=_bytes(given.get("memory"), problems),
        accelerator=accelerator,
        seconds=float(_number("seconds", given, problems) or 120),
    )


def _number(name: str, given: dict[str, str], problems: Problems) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= _MOST and len(text) < 9):
        problems.add(f"--{name} {shown(text)}: give a whole number from 1 to {_MOST}")
        return None
    return int(text)


def _bytes(text: str | None, problems: Problems) -> int:
    found = _SIZE.fullmatch(text or "")
    if found is None or not float(found[1]):
        what = "not given" if text is None else f"{shown(text)} is no size"
        problems.add(f"--memory: {what}; give the memory of a device, such as --memory 80G")
        return 0
    return int(float(found[1]) * _UNITS[found[2].upper()])


def planned(request: Request, options: Options, problems: Problems) -> tuple[Options, int, int]:
    """The options without those that the plan replaces, the devices per node and the nodes."""
    devices = request.devices
    if devices is None:
        given = options.devices
        if isinstance(given, list):
            devices = len(given)
        elif str(given).isdigit() and int(given) > 0:
            devices = int(given)
        else:
            problems.add(
                f"devices={shown(given)}: a plan needs their number on a node; give --devices N"
            )
    nodes = request.num_nodes or options.num_nodes or 1
    options = replace(
        options, accelerator="cpu", auto_select_gpus=False, devices="auto", num_nodes=None
    )
    return options, devices or 1, nodes


def finder(request: Request, devices: int, nodes: int) -> Callable[[Options, Problems], Placement]:
    """What finds where a run will be, in :func:`~...run.plan.make`."""

    def find(options: Options, problems: Problems) -> Placement:
        ranks = devices * nodes
        auto = "ddp" if ranks > 1 or options.strategy_options else "single_device"
        if request.accelerator in ADDED:
            auto = ADDED[request.accelerator].strategy
        wanted: Any = auto if options.strategy == "auto" else options.strategy
        made: Strategy | None = wanted if isinstance(wanted, Strategy) else None
        if made is None:
            with problems:
                made = registry.create(wanted, options.strategy_options or {})
        elif options.strategy_options:
            problems.add("strategy_options belong to a strategy's name; this one is already made")
        name = type(wanted).__name__ if isinstance(wanted, Strategy) else str(wanted)
        made = made or registry.create(auto, {})
        local = made.limits.local_processes(devices)
        source = next(iter(made.limits.sources), "plan")
        layout = Layout(
            world_size=local * nodes, local_world_size=local, num_nodes=nodes, source=source
        )
        return Placement(request.accelerator, layout, tuple(range(devices)), nodes, name, made)

    return find
