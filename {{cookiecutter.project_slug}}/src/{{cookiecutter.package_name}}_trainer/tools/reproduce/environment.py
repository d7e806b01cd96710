"""What differs between the record of a run and this machine, or between two records."""

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import run_directory
from ...launch.cluster import Layout
from ...launch.start import threads_each
from ...run import record
from ...run.data_files import hash_of

Attempt = Mapping[str, Any]
# Ids of jobs and names of their nodes; and what torch and the trainer set when they start.
_OWN = re.compile(
    r"SLURM_|KMP_|CUBLAS_WORKSPACE_CONFIG$|PYTORCH_NVML_BASED_CUDA_CHECK$|\w+_SOCKET_IFNAME$"
)
_OF_HOSTS = {
    **{"cpu": "CPU", "capability": "CPU capability", "threads": "threads"},
    **{"gpus": "GPUs", "driver": "GPU driver", "cuda": "CUDA", "nccl": "NCCL"},
}


def here(layout: Layout, options: Mapping[str, Any]) -> Attempt:
    """The facts of a record that are known before a run with some options of the trainer."""
    devices = options.get("devices")
    processes = devices if isinstance(devices, int) and devices > 0 else 1
    found, host = record.here(Path.cwd()), record.host(torch.device("cpu"))
    if processes > 1 and not layout.started_outside:  # as our launcher sets it
        threads = found["variables"].setdefault("OMP_NUM_THREADS", str(threads_each(processes)))
        host["threads"] = int(threads) if threads.isdecimal() else host["threads"]
    world = layout.world_size if layout.started_outside else processes * layout.num_nodes
    known = {name: host[name] for name in ("cpu", "capability", "threads")}
    nodes = {"world_size": world, "num_nodes": layout.num_nodes}
    return {**found, "layout": nodes, "hosts": [known], "seed": options.get("seed")}


def differences(recorded: Attempt, now: Attempt) -> Iterator[str]:
    """One line for each difference; what ``now`` does not have is not compared."""
    git = recorded.get("git") or {}
    if git.get("dirty") and "diff" not in git:
        yield "diff: the image was built from changed files, which are not recorded"
    if git.get("diff_cut"):
        yield "diff: only its first MiB is recorded"
    theirs, ours = _compared(recorded), _compared(now)
    if theirs["commit"] is ours["commit"] is None:
        yield "commit: unknown, here and in the record: the code is not compared"
    for name, value in ours.items():
        yield from _differences(name, value, theirs.get(name))


def _compared(attempt: Attempt) -> dict[str, Any]:
    """What is compared of an attempt, by the beginning of its line."""
    git = attempt.get("git") or {}
    found: dict[str, Any] = {"commit": git.get("commit"), "diff": None, "file": None}
    if "diff" in git:
        found["diff"] = _by_file(git["diff"])
        found["file"] = dict.fromkeys(git["untracked"], "untracked")
    names = ("directory", "seed", "strategy", "precision", "image", "template", "locks", "packages")
    for name in names:
        found |= {name.removesuffix("s"): attempt[name]} if name in attempt else {}
    given = attempt.get("variables") or {}
    found["variable"] = {name: given[name] for name in given if not _OWN.match(name)}
    found["layout"] = _processes(attempt.get("layout") or {})
    for name, what in _OF_HOSTS.items():
        if values := {_shown(each[name]) for each in attempt.get("hosts") or [] if name in each}:
            found[what] = " and ".join(sorted(values))
    return found


def _by_file(diff: str) -> dict[str, str]:
    files = re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]
    hashes = (blake2b(each.encode(), digest_size=4).hexdigest() for each in files)
    names = (each.partition("\n")[0].rpartition(" b/")[2] for each in files)
    return {name: f"changes {each}" for name, each in zip(names, hashes, strict=True)}


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for each in sorted(ours.keys() | theirs.keys()):
            yield from _differences(f"{name}: {each}", ours.get(each), theirs.get(each))
    elif isinstance(ours, dict) or isinstance(theirs, dict):
        if ours or theirs:
            yield f"{name}: unknown {'in the record' if ours else 'here'}"
    elif ours != theirs:
        yield f"{name}: {_shown(ours)}, recorded {_shown(theirs)}"


def data(recorded: Attempt) -> Iterator[str]:
    """One line for each recorded data file that has changed since, or that cannot be compared."""
    files = recorded.get("data") or []
    for each in files:
        if problem := _changed(Path(str(each["path"])), each):
            yield f"data: {each['path']}: {problem}"
    if unhashed := sum(each["sha256"] is None for each in files):
        yield f"data: {unhashed} files have no hash in the record: their sizes and times count"
    if recorded.get("data_cut"):
        yield "data: not all files are in the record"


def _changed(path: Path, recorded: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return "missing"
    facts = path.stat()
    if facts.st_size != recorded["bytes"]:
        return f"{facts.st_size} bytes, recorded {recorded['bytes']}"
    if recorded["sha256"] is None:
        is_same = facts.st_mtime_ns == recorded["modified"]
        return None if is_same else "modified since; it has no hash in the record"
    return None if hash_of(path) == recorded["sha256"] else "its content differs"


def of_run(run: Path, attempts: list[dict[str, Any]]) -> Iterator[str]:
    """One line for what one attempt cannot repeat of several."""
    worlds = list(dict.fromkeys(_processes(each.get("layout") or {}) for each in attempts))
    if len(worlds) > 1:
        yield f"layout: the attempts of the run had {', then '.join(worlds)}"
    for path in sorted(run.glob("config.*.yaml")):
        yield f"config: an earlier attempt had another one, {path.name}"
    if run_directory.was_cut_off(run):
        yield "the run was killed, or still runs: what its record has is compared"


def _processes(layout: Mapping[str, Any]) -> str:
    world, nodes = layout.get("world_size"), layout.get("num_nodes")
    return f"{world} process{'es' * (world != 1)} on {nodes} node{'s' * (nodes != 1)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)[:200]
