"""What differs between a record and this machine, and between two runs: hashes and values."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from ...checkpoint import run_directory
from ...launch import files
from ...launch.cluster import Layout
from ...launch.start import threads_each
from ...logging.loggers import read_rows
from ...loop.hashes import DIRECTORY
from ...run import data_record, record

_MOST_BYTES = 2**27  # of a rank's hashes
Attempt = Mapping[str, Any]
# Ids of jobs and names of their nodes; and what torch and the trainer set when they start.
_OWN = r"SLURM_|KMP_|CUBLAS_WORKSPACE_CONFIG$|PYTORCH_NVML_BASED_CUDA_CHECK$|\w+_SOCKET_IFNAME$"
_OF_HOSTS = {
    **{"cpu": "CPU", "capability": "CPU capability", "threads": "threads"},
    **{"gpus": "GPUs", "driver": "GPU driver", "cuda": "CUDA", "nccl": "NCCL"},
}
Steps = dict[int, dict[str, Any]]
_ONLY = "recorded with --trainer.record_hashes true only"
_CAUSES = {  # in the order in which one follows from the other
    "data": "the batch: the data, its order (seed, number of processes), or an augmentation",
    "options": "options of the optimizer: the learning rate, its schedule or scaling",
    "random": "random numbers: the seed, or code that draws other numbers",
    "loss": "the forward pass: code, a package, the hardware, threads, or the weights before it",
    "gradients": "the backward pass: its kernels, a package, the hardware, the number of processes",
    "weights": "the initial weights, the step of the optimizer, or buffers: code, a package",
    "optimizer": "the state of the optimizer: its code, or a package",
}


def here(layout: Layout, options: Mapping[str, Any]) -> Attempt:
    """The facts of a record that are known before a run with some options of the trainer."""
    devices = options.get("devices")
    processes = devices if isinstance(devices, int) and devices > 0 else 1
    facts, host = record.here(Path.cwd()), record.host(torch.device("cpu"))
    if processes > 1 and not layout.started_outside:  # as our launcher sets it
        threads = facts["variables"].setdefault("OMP_NUM_THREADS", str(threads_each(processes)))
        host["threads"] = int(threads) if threads.isdecimal() else host["threads"]
    world = layout.world_size if layout.started_outside else processes * layout.num_nodes
    known = {name: host[name] for name in ("cpu", "capability", "threads")}
    nodes = {"world_size": world, "num_nodes": layout.num_nodes}
    return {**facts, "layout": nodes, "hosts": [known], "seed": options.get("seed")}


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
    compared: dict[str, Any] = {"commit": git.get("commit"), "diff": None, "file": None}
    if "diff" in git:
        compared["diff"] = _by_file(git["diff"])
        compared["file"] = dict.fromkeys(git["untracked"], "untracked")
    names = ("directory", "seed", "strategy", "precision", "image", "template", "locks", "packages")
    compared |= {name.removesuffix("s"): attempt[name] for name in names if name in attempt}
    variables, layout = dict(attempt.get("variables") or {}), attempt.get("layout") or {}
    if layout.get("world_size") != 1 and variables.get("PYTHONHASHSEED") == "0":
        del variables["PYTHONHASHSEED"]  # our launcher sets it for its ranks
    compared["variable"] = {name: variables[name] for name in variables if not re.match(_OWN, name)}
    compared["layout"] = _processes(layout)
    for name, label in _OF_HOSTS.items():
        if values := {_shown(host[name]) for host in attempt.get("hosts") or [] if name in host}:
            compared[label] = " and ".join(sorted(values))
    return compared


def _by_file(diff: str) -> dict[str, str]:
    files = re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]
    hashes = (blake2b(file.encode(), digest_size=4).hexdigest() for file in files)
    names = (file.partition("\n")[0].rpartition(" b/")[2] for file in files)
    return {name: f"changes {digest}" for name, digest in zip(names, hashes, strict=True)}


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from _differences(f"{name}: {key}", ours.get(key), theirs.get(key))
    elif isinstance(ours, dict) or isinstance(theirs, dict):
        if ours or theirs:
            yield f"{name}: unknown {'in the record' if ours else 'here'}"
    elif ours != theirs:
        yield f"{name}: {_shown(ours)}, recorded {_shown(theirs)}"


def data(recorded: Attempt) -> Iterator[str]:
    """One line for each recorded data file that has changed since, or that cannot be compared."""
    files = recorded.get("data") or []
    for file in files:
        path, problem = Path(str(file["path"])), ""
        facts = path.stat() if path.is_file() else None
        if facts is None:
            problem = "missing"
        elif facts.st_size != file["bytes"]:
            problem = f"{facts.st_size} bytes, recorded {file['bytes']}"
        elif file["sha256"] is None and facts.st_mtime_ns != file["modified"]:
            problem = "modified since; it has no hash in the record"
        elif file["sha256"] is not None and data_record.hash_of(path) != file["sha256"]:
            problem = "its content differs"
        if problem:
            yield f"data: {file['path']}: {problem}"
    if unhashed := sum(file["sha256"] is None for file in files):
        yield f"data: {unhashed} files have no hash in the record: their sizes and times count"
    if recorded.get("data_cut"):
        yield "data: not all files are in the record"


def of_run(run: Path, attempts: list[dict[str, Any]]) -> Iterator[str]:
    """One line for what one attempt cannot repeat of several."""
    worlds = list(dict.fromkeys(_processes(attempt.get("layout") or {}) for attempt in attempts))
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


def compare(recorded: Path, reproduced: Path, last: int) -> tuple[bool, list[str]]:
    """Whether two run directories are bit-equal up to a step, and the lines that say so."""
    theirs, ours = read(recorded), read(reproduced)
    ranks = sorted(theirs.keys() & ours.keys())
    steps = sorted({step for rank in ranks for step in theirs[rank] if step <= last})
    if not steps:
        return False, ["not compared: the two runs have no hashes of the same step"]
    complete = _complete(recorded, last)
    count, differing = _metrics(recorded, reproduced, last, complete)
    lines = []
    for rank in ranks:
        if lost := [step for step in ours[rank] if step <= complete and step not in theirs[rank]]:
            end = f"step {min(lost)} is missing; the file is damaged or was cut"
            lines.append(f"{recorded / DIRECTORY}/rank-{rank:05}.jsonl: {end}")
    if theirs.keys() != ours.keys():
        lines += [f"hashes of {len(ours)} ranks, recorded {len(theirs)}: rank 0 … are compared"]
    for before, step in zip([-1, *steps], steps, strict=False):
        if first := _first_difference(step, [(rank, theirs[rank], ours[rank]) for rank in ranks]):
            if before + 1 < step:
                between = f"steps {before + 1} to {step - 1}, in which it may have begun"
                first += f"; {between}, are {_ONLY}"
            return False, [*lines, first, *differing]
    if differing or lines:
        return False, [*lines, *differing, "the steps that both have recorded are equal"]
    made = len(steps) - (0 in steps)
    scope = f"{made} step{'s' * (made != 1)}, {len(ranks)} rank{'s' * (len(ranks) != 1)}"
    rest = f"; steps {steps[-1] + 1} to {last} are {_ONLY}" * (steps[-1] < last)
    return True, [f"bit-equal: {scope}, up to step {steps[-1]}; {count} logged values{rest}"]


def _complete(run: Path, last: int) -> int:
    """The step up to which a reproduction records only what the run must have recorded, too."""
    if any(run.glob("config.*.yaml")):  # its attempts may have recorded other steps
        return -1
    ends = [attempt.get("ended") for attempt in run_directory.attempts(run)]
    # A run that ends early logs its last step, which one that does not need not.
    return last if f"finished step {last}" in ends[-1:] else last - 1


def read(run: Path) -> dict[int, Steps]:
    """The hashes of each rank by step; of files that are no hashes none."""
    hashes: dict[int, Steps] = {}
    for path in sorted((run / DIRECTORY).glob("rank-*.jsonl")):
        # The last line was cut if the process was killed.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError):
            steps = hashes.setdefault(int(path.stem.removeprefix("rank-")), {})
            for values in map(json.loads, files.lines(path, _MOST_BYTES)):
                steps[int(values["step"])] = values
    return hashes


def _first_difference(step: int, ranks: list[tuple[int, Steps, Steps]]) -> str | None:
    """The first thing that differs in a step, on the lowest rank."""
    for rank, theirs, ours in ranks:
        # The last step of an attempt is recorded, and may be one in the middle of another.
        if step in theirs and step > max(ours, default=-1):
            return f"step {step}: rank {rank} has not recorded it again"
    when = f"step {step}" if step else "before the first step"
    for name, cause in _CAUSES.items():
        for rank, theirs, ours in ranks:
            if step in theirs and step in ours and theirs[step].get(name) != ours[step].get(name):
                return f"{when}, rank {rank}: {name} is the first that differs: {cause}"
    return None


def _metrics(recorded: Path, reproduced: Path, last: int, complete: int) -> tuple[int, list[str]]:
    """How many logged values both runs have, and the first of them that differs or is missing."""
    theirs, ours = _values(recorded), _values(reproduced)
    common = [key for key in theirs if key in ours and key[0] <= last]
    for key in (key for key in common if ours[key] != theirs[key]):
        line = f"{key[2]} is {ours[key]}, recorded {theirs[key]}"
        return len(common), [f"metrics.csv differs first at step {key[0]}: {line}"]
    lost = [key for key in ours if key not in theirs and key[0] <= complete]
    # The logger csv writes both files; without it, a run has neither.
    if lost and any((recorded / name).exists() for name in ("metrics.csv", "speed.csv")):
        problem = f"{len(lost)} values are missing, the first is {lost[0][2]} of step {lost[0][0]}"
        return len(common), [f"{recorded / 'metrics.csv'}: {problem}; it was removed or cut"]
    return len(common), []


def _values(run: Path) -> dict[tuple[int, str, str], str]:
    rows = read_rows(run / "metrics.csv", [])
    return {(step, epoch, name): value for step, epoch, name, value in rows}
