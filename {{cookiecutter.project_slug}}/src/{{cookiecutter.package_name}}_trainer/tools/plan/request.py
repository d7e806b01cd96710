"""What ``plan`` and job scripts ask for, and where a run is placed: on devices not here."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple
from unittest import mock

from ...cli import arguments
from ...errors import Problems, shown
from ...launch import cluster
from ...options import Options, values
from ...options.numbers import PositiveInt
from ...run import placement

_OWN = {
    "devices": "devices per node; default: trainer.devices",
    "num_nodes": "number of nodes; default: trainer.num_nodes, or 1",
    "memory": "memory of a device, such as 80G (of 2^30 bytes); on CPUs, that of a process",
    "accelerator": "gpu (default) or cpu",
    "seconds": "time limit of each traced step; default: 120",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SCRIPTS = ("slurm/train.sh", "slurm/settings.sh")
_OPTION = r"(?m)^(?:#SBATCH\s+--|\s*export\s+SBATCH_)([a-zA-Z_-]+)[= ]\s*[\"']?([^\"'\s#]+)"


class Request(NamedTuple):
    """The plan's own options; ``words`` are those of ``fit``."""

    words: Sequence[str]
    as_json: bool
    memory: int
    accelerator: str
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
    device = "cuda" if found.get("accelerator") == "gpu" else "cpu"
    return Request(others, own.json, _bytes(own.memory, problems), device, found.get("seconds", 1))


def _bytes(text: str | None, problems: Problems) -> int:
    found = _SIZE.fullmatch(text or "")
    if found is None or not float(found[1]):
        what = "not given" if text is None else f"{shown(text)} is no size"
        problems.add(f"--memory: {what}; give the memory of a device, such as --memory 80G")
        return 0
    return int(float(found[1]) * _UNITS[found[2].upper()])


def find(accelerator: str, options: Options, problems: Problems) -> placement.Placement:
    """Find where a run will be, for :func:`~...run.plan.make`: not on this machine.

    ``options`` have the number of devices on a node, as CPUs.
    """
    if str(options.devices) in ("auto", "-1"):
        problems.add("devices: a plan needs their number on a node; give --devices N")
    with mock.patch.dict("os.environ", {cluster.OVERRIDE: "none"}):
        where = placement.find(options, problems)
    limits, nodes = where.strategy.limits, where.nodes
    local, source = limits.local_processes(len(where.devices)), next(iter(limits.sources), "plan")
    layout = cluster.Layout(
        world_size=local * nodes, local_world_size=local, num_nodes=nodes, source=source
    )
    return replace(where, accelerator=accelerator, layout=layout)


def disagreements(root: Path, devices: int, nodes: int, accelerator: str) -> list[str]:
    """One line for each option of sbatch that is not the plan's, with what overrides it."""
    on_gpus = accelerator != "cpu"
    scripts = [name for name in _SCRIPTS if (root / name).is_file()]
    found: dict[str, tuple[str, str]] = {}  # later ones win
    for name in scripts:
        for line in re.finditer(_OPTION, (root / name).read_text("utf-8", errors="replace")):
            key = line[1].lower().replace("_", "-")
            found[key] = line[2], f"{name}: {line[0].strip()}"
    expected = {"nodes": nodes, "ntasks": nodes * devices, "ntasks-per-node": devices}
    if on_gpus:
        expected |= {"gpus": nodes * devices, "gpus-per-node": devices}
        expected |= {"gpus-per-task": 1, "gres": devices}
    ways = ("gpus-per-node", "gpus-per-task", "gpus", "gres", "ntasks")
    key, *others = ways if on_gpus else ("ntasks-per-node", "ntasks")
    defaults = {"nodes": "1", key: "0" if on_gpus else "1"}
    if found.keys() & {key, *others}:
        del defaults[key]
    for name, default in defaults.items() if scripts else ():
        found.setdefault(name, (default, f"no #SBATCH line says {name}"))
    lines = []
    for name, number in expected.items():
        value, place = found.get(name, ("", ""))
        given = value.rpartition(":")[2]
        if given.isdigit() and int(given) != number:
            lines.append(f"{place}, and the plan has {number}: give sbatch --{name}={number}")
    return lines
