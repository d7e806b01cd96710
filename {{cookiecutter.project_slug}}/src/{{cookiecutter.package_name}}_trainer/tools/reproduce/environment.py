"""What differs between the record of a run and this machine, or between two records."""

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import run_directory
from ...launch.cluster import Layout
from ...launch.start import threads_each
from ...run import record
from ...run.data_files import hash_of
from ...run.repository import commit

Attempt = Mapping[str, Any]
# Ids of jobs and names of their nodes; and what torch and the trainer set when they start.
_OWN = re.compile(
    r"SLURM_|KMP_|CUBLAS_WORKSPACE_CONFIG$|PYTORCH_NVML_BASED_CUDA_CHECK$|\w+_SOCKET_IFNAME$"
)
_HOST = {
    "cpu": "CPU",
    "capability": "CPU capability",
    "threads": "threads",
    "gpus": "GPUs",
    "driver": "GPU driver",
    "cuda": "CUDA",
    "nccl": "NCCL",
}


def here(layout: Layout, processes: int) -> Attempt:
    """The facts of a record that are known before the run; ``processes`` are those of a node."""
    host = record.host(torch.device("cpu"))
    variables = record.variables()
    if processes > 1 and not layout.started_outside:  # as our launcher sets it
        variables.setdefault("OMP_NUM_THREADS", str(threads_each(processes)))
        if variables["OMP_NUM_THREADS"].isdecimal():
            host["threads"] = int(variables["OMP_NUM_THREADS"])
    world = layout.world_size if layout.started_outside else processes * layout.num_nodes
    return {
        "directory": str(Path.cwd()),
        "git": commit(Path.cwd()),
        "template": record.template(),
        "locks": record.locks(),
        "packages": record.packages(),
        "image": record.image(),
        "variables": variables,
        "layout": {"world_size": world, "num_nodes": layout.num_nodes},
        "hosts": [{name: host[name] for name in ("cpu", "capability", "threads")}],
    }


def differences(recorded: Attempt, now: Attempt) -> Iterator[str]:
    """One line for each difference; what ``now`` does not have is not compared."""
    yield from _code(_dict(recorded, "git"), _dict(now, "git"))
    for name in ("directory", "image"):
        if name in now and recorded.get(name) != now[name]:
            yield f"{name}: {_shown(now[name])}, recorded {_shown(recorded.get(name))}"
    yield from _template(_dict(recorded, "template"), _dict(now, "template"))
    for name, what in (("locks", "lock"), ("packages", "package"), ("variables", "variable")):
        if name in now:
            yield from _entries(what, _dict(recorded, name), _dict(now, name))
    if "layout" in now:
        ours, theirs = ((_dict(each, "layout")) for each in (now, recorded))
        names = ("world_size", "num_nodes")
        if any(ours.get(name) != theirs.get(name) for name in names):
            yield f"layout: {_processes(ours)}, recorded {_processes(theirs)}"
    yield from _hosts(recorded, now)


def _hosts(recorded: Attempt, now: Attempt) -> Iterator[str]:
    for name, what in _HOST.items():
        ours, theirs = (
            " and ".join(sorted({_shown(each[name]) for each in part["hosts"] if name in each}))
            for part in ({"hosts": [], **now}, {"hosts": [], **recorded})
        )
        if ours and ours != theirs:
            yield f"{what}: {ours}, recorded {theirs or 'unknown'}"


def _code(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    ours, theirs = now.get("commit"), recorded.get("commit")
    if ours is theirs is None:
        yield "commit: unknown, here and in the record: the code is not compared"
    elif ours != theirs:
        yield f"commit: {ours or 'unknown here'}, recorded {theirs or 'unknown'}"
    if recorded.get("dirty") and "diff" not in recorded:
        yield "diff: the image was built from changed files, which are not recorded"
    if recorded.get("diff_cut"):
        yield "diff: only its first MiB is recorded"
    files = [_by_file(str(each.get("diff", ""))) for each in (recorded, now)]
    if "diff" in recorded and "diff" in now:
        for name in sorted(files[0].keys() | files[1].keys()):
            if files[0].get(name) != files[1].get(name):
                yield f"diff: {name} differs from what was run"
    for name in sorted(set(now.get("untracked", ())) ^ set(recorded.get("untracked", ()))):
        place = "not in the record" if name in now.get("untracked", ()) else "not here"
        yield f"untracked file: {name}: {place}"


def _by_file(diff: str) -> dict[str, str]:
    parts = re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].rpartition(" b/")[2]: part for part in parts}


def _template(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if not (recorded and now):
        if recorded or now:
            yield f"template: unknown {'here' if recorded else 'in the record'}"
        return
    pair = ({"version": each.get("version"), **_dict(each, "answers")} for each in (recorded, now))
    yield from _entries("template", *pair)


def _entries(what: str, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(recorded.keys() | now.keys()):
        ours, theirs = now.get(name), recorded.get(name)
        if ours != theirs and not (what == "variable" and _OWN.match(name)):
            if what == "lock" and ours and theirs:
                yield f"{what}: {name} differs"
            else:
                yield f"{what}: {name}: {_shown(ours)}, recorded {_shown(theirs)}"


def data(recorded: Attempt) -> Iterator[str]:
    """One line for each recorded data file that has changed since, or that cannot be compared."""
    unhashed = 0
    for each in recorded.get("data") or []:
        path, size = Path(str(each.get("path"))), each.get("bytes")
        try:
            facts = path.stat()
        except OSError:
            yield f"data: {path}: missing"
            continue
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != size:
            yield f"data: {path}: {facts.st_size} bytes, recorded {size}"
        elif each.get("sha256") is None:
            unhashed += 1
            if facts.st_mtime_ns != each.get("modified"):
                yield f"data: {path}: modified since; it has no hash in the record"
        elif hash_of(path) != each["sha256"]:
            yield f"data: {path}: its content differs"
    if unhashed:
        yield f"data: {unhashed} files have no hash in the record; their sizes and times are equal"
    if recorded.get("data_cut"):
        yield "data: not all files are in the record"


def configured(recorded: Attempt, trainer: Mapping[str, Any]) -> Iterator[str]:
    """One line for each option of ``config.yaml`` that contradicts the record."""
    for name in ("seed", "strategy", "precision"):
        given = trainer.get(name)
        if given not in (None, "auto", recorded.get(name)) and isinstance(given, str | int):
            yield f"{name}: {given} in config.yaml, recorded {_shown(recorded.get(name))}"


def of_attempts(run: Path, attempts: list[dict[str, Any]]) -> Iterator[str]:
    """One line for what one attempt cannot repeat of several."""
    worlds = list(dict.fromkeys(_processes(_dict(each, "layout")) for each in attempts))
    if len(worlds) > 1:
        yield f"layout: the attempts of the run had {', then '.join(worlds)}"
    for path in sorted(run.glob("config.*.yaml")):
        yield f"config: an earlier attempt had another one, {path.name}"
    if run_directory.was_cut_off(run):
        yield "the run was killed, or still runs: what its record has is compared"


def _processes(layout: Mapping[str, Any]) -> str:
    world, nodes = layout.get("world_size"), layout.get("num_nodes")
    return f"{world} process{'es' * (world != 1)} on {nodes} node{'s' * (nodes != 1)}"


def _dict(whole: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = whole.get(name)
    return found if isinstance(found, dict) else {}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return "none" if value is None else str(value)[:200]
