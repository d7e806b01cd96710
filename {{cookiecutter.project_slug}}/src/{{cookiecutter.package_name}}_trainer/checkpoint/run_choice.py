"""Select the run directory, and the checkpoint from which to resume.

The checkpoints of a run form one lineage: each descends from the previous one. So an existing run
is continued or overwritten only as a whole, and by one training process at a time.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import (
    CheckpointError,
    ConfigurationError,
    DiskError,
    Problems,
    UserError,
    refused,
    shown,
    user_error,
)
from ..launch import collectives, files, rank
from ..launch.cluster import Layout
from ..options import Options
from . import reading, run_directory
from .run_lock import RunLock


@dataclass(frozen=True)
class Request:
    """The user's options for the run directory, as in :class:`Options`; paths are absolute."""

    root: Path
    name: str | None = None
    resume: str | None = None
    overwrite: bool = False
    launched: float | None = None  # when the program was started that restarts ranks, if one does

    @classmethod
    def of(cls, options: Options) -> "Request":
        resume, root = options.resume, Path(options.default_root_dir).absolute()
        if resume is not None:
            resume = "auto" if resume == "auto" else str(Path(resume).absolute())
        return cls(root, options.run_name, resume, options.overwrite)


@dataclass(frozen=True)
class Selection:
    directory: Path
    checkpoint: Path | None = None
    is_same_run: bool = False  # the checkpoint belongs to this run
    remarks: list[str] = field(default_factory=list)  # to print
    overwrites: bool = False  # a run that is there is replaced


def check(options: Options, layout: Layout, problems: Problems) -> None:
    """Check where a run writes and from what it resumes; ``problems`` collects a line per error."""
    with problems:
        run_directory.check_name(options.run_name)
    if options.resume == "auto":
        # torchrun's restarts name the run by its --rdzv-id.
        name = rank.elastic_run_name() if rank.restarts_expected(layout) else None
        if (options.run_name or name) is None:
            advice = "add --trainer.run_name NAME, or set resume to a run directory"
            problems.add(f"resume='auto' needs run_name, the run to look for: {advice}")
        if options.overwrite:
            reason = "the one replaces the run that the other continues"
            problems.add(f"overwrite=True with resume='auto': {reason}; leave out one of them")
    elif options.resume is not None and not files.pointed(Path(options.resume)).is_dir():
        advice = "give a run directory or a checkpoint"
        problems.add(f"resume={shown(options.resume)}: no such directory; {advice}")


def check_new(request: Request) -> None:
    """Raise ConfigurationError if a new run could not write, or would use an old one's directory.

    A run that goes on writes to its own directory.
    """
    if request.resume in (None, "auto"):
        check_root(request.root)
    if request.name is not None and request.resume is None and not request.overwrite:
        _check_empty(request.root / request.name)


def check_root(root: Path) -> None:
    """Raise ConfigurationError if no directory could be created in that of all runs."""
    option = f"default_root_dir={shown(str(root))}"
    try:
        existing = next(folder for folder in (root, *root.parents) if folder.exists())
    except OSError as error:
        raise refused(option, error) from None
    if not existing.is_dir():
        raise ConfigurationError(f"{option}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        advice = "give a directory that can"
        raise ConfigurationError(f"{option}: {existing} cannot be written; {advice}")


def choose(request: Request, layout: Layout, lock: RunLock) -> Selection:
    """Select the run directory and the checkpoint on rank 0, for all, and lock the directory."""
    answer: dict[str, Any] = {}
    if layout.is_main:
        try:
            answer = _choose(request, lock)
        except UserError as error:
            answer = {"error": [error.problems, error.code]}
    # Only rank 0 looks: at another moment, another rank could find another newest checkpoint.
    answer = collectives.broadcast(answer)
    if "error" in answer:
        raise user_error(*answer["error"])
    lock.attempt = answer["attempt"]
    directory, remarks = Path(answer["directory"]), list(answer["remarks"])
    checkpoint = _first_intact([Path(candidate) for candidate in answer["candidates"]], remarks)
    is_same = checkpoint is not None and _is_of(checkpoint, directory)
    return Selection(directory, checkpoint, is_same, remarks, answer["overwrites"])


def open_checkpoint(path: Path) -> reading.Checkpoint:
    """Open a checkpoint, or raise a CheckpointError that names the one before, if it is corrupt."""
    if (damage := _damage(path)) is not None:
        before = run_directory.before(path)
        raise type(damage)(f"{damage}; the previous one is {before[-1]}" if before else str(damage))
    return reading.Checkpoint(path)


def _choose(request: Request, lock: RunLock) -> dict[str, Any]:
    directory = _own_run(request, _candidates(request))
    directory = directory or run_directory.create(request.root, request.name)
    remark = lock.acquire(directory)
    if (record := directory / "run.json").exists() and not os.access(record, os.R_OK):
        line = f"{directory}: the run belongs to another user: its run.json cannot be read"
        raise ConfigurationError(f"{line}; use another run_name, or let that user go on")
    # All else only now: the run that had the lock may have saved, and removed what was there.
    if request.launched and run_directory.was_begun_since(directory, request.launched):
        request = Request(directory.parent, directory.name, "auto")  # whatever it began with
    candidates = _candidates(request)
    is_same = _own_run(request, candidates) is not None
    if is_same and request.overwrite:
        problem = f"{directory} is the run that resume={request.resume!r} resumes"
        raise ConfigurationError(f"overwrite: {problem}; leave out one of them")
    if not (is_same or request.overwrite or request.resume == "auto"):
        _check_empty(directory)
    return {
        "attempt": lock.attempt,
        "directory": str(directory),
        "overwrites": request.overwrite,
        "candidates": [str(path) for path in candidates],
        "remarks": [remark] if remark else [],
    }


def _own_run(request: Request, candidates: list[Path]) -> Path | None:
    """The run of the checkpoints, if it is the one that is asked for."""
    source = reading.run_of(candidates[0]) if candidates else None
    if source is None or request.name is None:
        return source
    return source if _is_of(candidates[0], request.root / request.name) else None


def _candidates(request: Request) -> list[Path]:
    if request.resume is None:
        return []
    if request.resume != "auto":
        return reading.candidates(request.resume)
    if request.name is None:
        return []
    directory = request.root / request.name
    try:
        return reading.candidates(directory)
    except CheckpointError:
        # The run has no checkpoint yet; it may have started from one of another run.
        first = next(iter(run_directory.attempts(directory)), {}).get("resumed_from")
        return reading.candidates(first) if first and isinstance(first, str) else []


def _first_intact(candidates: list[Path], remarks: list[str]) -> Path | None:
    damage: list[CheckpointError] = []
    for path in candidates:
        if (error := _damage(path)) is None:
            remarks += [f"damaged, and not used: {earlier}" for earlier in damage]
            return path
        damage.append(error)
    if not damage:
        return None
    lines = [str(error) for error in damage]
    if len(lines) > 1:
        none = f"none of these {len(lines)} checkpoints is complete: resume from another one"
        lines.append(f"{none}; see docs/trouble.md#a-damaged-checkpoint")
    raise type(max(damage, key=lambda error: error.code))(lines)


def _damage(path: Path) -> CheckpointError | None:
    """Why a checkpoint is corrupt; each rank checks some of its files."""
    damage = None
    try:
        reading.Checkpoint(path).check_contents(collectives.rank(), collectives.world_size())
    except CheckpointError as error:
        damage = [str(error), isinstance(error, DiskError)]
    damage = next((report for report in collectives.gather(damage) if report is not None), None)
    return damage and (DiskError if damage[1] else CheckpointError)(damage[0])


def _is_of(checkpoint: Path, directory: Path) -> bool:
    run = reading.run_of(checkpoint)
    return run is not None and run.resolve() == directory.resolve()


def _check_empty(directory: Path) -> None:
    if not run_directory.holds_run(directory):
        return
    state = ", which has not finished" if run_directory.was_cut_off(directory) else ""
    has_saved = run_directory.complete(directory / run_directory.DIRECTORY)
    path = files.shown(directory, Path.cwd())
    resume = f"resume it (--trainer.resume {path}), " if has_saved else ""
    if not has_saved and (directory / run_directory.OVERWRITTEN).is_dir():
        kept = path / run_directory.OVERWRITTEN
        resume = f"resume the run that it overwrote (--trainer.resume {kept}), "
    advice = f"{resume}choose another run_name, or replace it (--trainer.overwrite true)"
    raise ConfigurationError(f"{path}: there is a run already{state}; {advice}")
