"""What ``plan`` is asked for, and where it places a run: on devices that need not be here."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import Problems, shown
from ...launch.cluster import Layout
from ...launch.devices import Accelerator
from ...options import Options, values
from ...options.fields import PositiveInt
from ...run import placement
from ...run.placement import Placement

_OWN = {
    "devices": "devices per node; default: trainer.devices",
    "num_nodes": "number of nodes; default: trainer.num_nodes, or 1",
    "memory": "memory of a device, such as 80G (of 2^30 bytes); on CPUs, that of a process",
    "accelerator": "gpu (default) or cpu",
    "seconds": "time limit of each traced step; default: 120",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MOST = 2**20


@dataclass(frozen=True)
class Request:
    """The plan's own options; ``words`` are those of ``fit``."""

    words: Sequence[str]
    as_json: bool
    memory: int
    accelerator: Accelerator
    seconds: int


def read(program: str, words: Sequence[str], problems: Problems) -> Request:
    """Take the plan's own options from a command line; ``problems`` has a line per error."""
    rest = f"and all options of '{program} fit --help'"
    parser = argparse.ArgumentParser(f"{program} plan", allow_abbrev=False, epilog=rest)
    for name, text in _OWN.items():
        parser.add_argument(f"--{name}", nargs="?", metavar="VALUE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    own, others = parser.parse_known_args(words)
    for name in ("devices", "num_nodes"):
        if (value := getattr(own, name)) is not None:
            others.append(f"--trainer.{name}={value}")
    given = {"accelerator": own.accelerator or "gpu", "seconds": own.seconds or "120"}
    types = {"accelerator": Literal["gpu", "cpu"], "seconds": PositiveInt}
    found = values.convert("--", types, given, problems)
    accelerator: Accelerator = "cuda" if found.get("accelerator") == "gpu" else "cpu"
    memory = _bytes(own.memory, problems)
    return Request(others, own.json, memory, accelerator, found.get("seconds", 1))


def _bytes(text: str | None, problems: Problems) -> int:
    found = _SIZE.fullmatch(text or "")
    if found is None or not float(found[1]):
        what = "not given" if text is None else f"{shown(text)} is no size"
        problems.add(f"--memory: {what}; give the memory of a device, such as --memory 80G")
        return 0
    return int(float(found[1]) * _UNITS[found[2].upper()])


class Finder:
    """Finds where a run will be, for :func:`~...run.plan.make`: on the devices that are planned.

    Args:
        accelerator: Of :class:`Request`.
        given: The options of ``fit``, with the number of devices and nodes.
        problems: Gets a line if they do not say how many devices there are.
    """

    def __init__(self, accelerator: Accelerator, given: Options, problems: Problems) -> None:
        self.accelerator, self.nodes = accelerator, given.num_nodes or 1
        devices = given.devices
        text = str(len(devices) if isinstance(devices, list) else devices)
        self.devices = int(text) if text.isdecimal() and len(text) < 9 else 0
        if not 0 < self.devices * self.nodes <= _MOST:
            problems.add(
                f"--devices {shown(devices)} on {self.nodes} nodes: a plan needs the number of "
                f"devices on a node, and {_MOST} of them in all at most"
            )
            self.devices = self.nodes = 1

    @property
    def place(self) -> dict[str, Any]:
        """The devices per node, the nodes, and the accelerator."""
        return {"devices": self.devices, "nodes": self.nodes, "accelerator": self.accelerator}

    def __call__(self, options: Options, problems: Problems) -> Placement:
        own = options.strategy_options or {}
        is_ddp = bool(own) or self.devices * self.nodes > 1
        auto = placement.auto_name(self.accelerator, Layout(), is_ddp)
        found = None
        with problems:
            found = placement.create(auto if options.strategy == "auto" else options.strategy, own)
        name, strategy = found or placement.create(auto, {})
        local = strategy.limits.local_processes(self.devices)
        layout = Layout(
            world_size=local * self.nodes,
            local_world_size=local,
            num_nodes=self.nodes,
            source=next(iter(strategy.limits.sources), "plan"),
        )
        devices = tuple(range(self.devices))
        return Placement(self.accelerator, layout, devices, self.nodes, name, strategy)
