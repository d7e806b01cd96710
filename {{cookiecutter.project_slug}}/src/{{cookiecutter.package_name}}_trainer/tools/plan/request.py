"""What ``plan`` is asked for, and where it places a run: on devices that need not be here."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from unittest import mock

from ...cli import arguments
from ...errors import Problems, shown
from ...launch import cluster
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
    parser = arguments.Parser(f"{program} plan", allow_abbrev=False, epilog=rest)
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


def finder(accelerator: Accelerator) -> Callable[[Options, Problems], Placement]:
    """What finds where a run will be, for :func:`~...run.plan.make`: not on this machine.

    Its options have the number of devices on a node, as CPUs.
    """

    def find(options: Options, problems: Problems) -> Placement:
        if str(options.devices) in ("auto", "-1"):
            problems.add("devices: a plan needs their number on a node; give --devices N")
        with mock.patch.dict("os.environ", {cluster.OVERRIDE: "none"}):
            where = placement.find(options, problems)
        limits = where.strategy.limits
        local = limits.local_processes(len(where.devices))
        layout = Layout(
            world_size=local * where.nodes,
            local_world_size=local,
            num_nodes=where.nodes,
            source=next(iter(limits.sources), "plan"),
        )
        return replace(where, accelerator=accelerator, layout=layout)

    return find
