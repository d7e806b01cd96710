"""Which directory a run writes, and which checkpoint it resumes from.

The checkpoints of a run are one lineage: each descends from the one before. So an existing run is
only continued or overwritten as a whole, and by one training at a time.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigurationError, UserError
from ..launch import collectives, files
from ..launch.cluster import Layout
from . import reading, run_directory
from .reading import Checkpoint
from .run_lock import RunLock


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Args:
        root: directory of runs.
        name: of the run; by default that of the run that is resumed, or the time.
        resume: a run's directory or a checkpoint; ``"auto"``: the newest checkpoint of the run
            ``name``, if there is one; ``None``: a new run.
        overwrite: replace a run that is in the directory.
    """

    root: Path
    name: str | None = None
    resume: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Chosen:
    """A run's directory, and the checkpoint that it resumes from.

    ``is_same_run``: whether the checkpoint is of this very run; ``remarks``: to be shown.
    """

    directory: Path
    checkpoint: Path | None = None
    is_same_run: bool = False
    remarks: list[str] = field(default_factory=list)


def refuse_existing(request: Request) -> None:
    """Refuse a new run in the directory of another one, before any process starts.

    Raises:
        ConfigurationError: there is a run already.
    """
    if request.name is None or request.overwrite:
        return
    directory = request.root / request.name
    if request.resume is None and run_directory.holds_run(directory):
        raise ConfigurationError(_exists(directory))


def choose(request: Request, layout: Layout, lock: RunLock) -> Chosen:
    """Pick a run's directory and checkpoint, the same on every rank, and lock the directory.

    Args:
        request: of the user.
        layout: rank 0 of it chooses.
        lock: taken by rank 0.

    Raises:
        UserError: there is no such checkpoint, none that is whole, the directory cannot be made,
            or another run is or writes there.
    """
    answer: dict[str, Any] = {}
    if layout.is_main:
        try:
            answer = _choose(request, lock)
        except UserError as error:
            answer = {"error": error.problems}
    # Rank 0 alone looks: another might look a moment later, and see another newest checkpoint.
    answer = collectives.broadcast(answer)
    if "error" in answer:
        raise UserError(answer["error"])
    directory = Path(answer["directory"])
    remarks = list(answer["remarks"])
    found = _first_whole([Path(each) for each in answer["candidates"]], remarks)
    source = reading.run_of(found) if found else None
    return Chosen(directory, found, source is not None and _same(source, directory), remarks)


def whole(path: Path) -> Checkpoint:
    """A checkpoint whose content is checked, each rank looking through some of its files.

    Raises:
        CheckpointError: it is damaged; the line names the one before, if there is one.
    """
    problems = [each for each in collectives.gather(_damage(path)) if each is not None]
    if problems:
        before = [each for each in reading.complete(path.parent) if _is_before(each, path)]
        hint = f"; the one before is {before[-1]}" if before else ""
        raise CheckpointError(problems[0] + hint)
    return Checkpoint(path)


def _is_before(one: Path, other: Path) -> bool:
    return reading.step_of(one) < reading.step_of(other)


def _choose(request: Request, lock: RunLock) -> dict[str, Any]:
    candidates = _candidates(request)
    source = reading.run_of(candidates[0]) if candidates else None
    if source is not None and (request.name is None or _same(source, request.root / request.name)):
        directory = source
    else:
        directory = run_directory.create(request.root, request.name)
    remark = lock.acquire(directory)
    is_same = source is not None and _same(source, directory)
    if is_same and request.overwrite:
        raise ConfigurationError(
            f"overwrite: {directory} is the run that resume={request.resume!r} resumes; leave out "
            "one of them"
        )
    is_continued = is_same or request.overwrite or request.resume == "auto"
    if not is_continued and run_directory.holds_run(directory):
        raise ConfigurationError(_exists(directory))
    return {
        "directory": str(directory),
        "candidates": [str(path) for path in candidates],
        "remarks": [remark] if remark else [],
    }


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
        # It has not saved yet; perhaps it began with another run's checkpoint.
        first = run_directory.first_resumed(directory)
        return reading.candidates(first) if first else []


def _first_whole(candidates: list[Path], remarks: list[str]) -> Path | None:
    """The first checkpoint that is not damaged; each rank looks through some of its files."""
    damage: list[str] = []
    for path in candidates:
        told = collectives.gather(_damage(path))
        found = next((each for each in told if each is not None), None)
        if found is None:
            remarks += [f"damaged, and not used: {line}" for line in damage]
            return path
        damage.append(found)
    if damage:
        raise CheckpointError([*damage, *_all_damaged(candidates)])
    return None


def _damage(path: Path) -> str | None:
    try:
        Checkpoint(path).check_contents(collectives.rank(), collectives.world_size())
    except CheckpointError as error:
        return str(error)
    return None


def _all_damaged(candidates: list[Path]) -> list[str]:
    if len(candidates) == 1:
        return []
    return [f"none of these {len(candidates)} checkpoints is whole: resume from another one"]


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _exists(directory: Path) -> str:
    resume, has_saved = "", reading.complete(directory / reading.DIRECTORY)
    directory = files.shown(directory, Path.cwd())
    if has_saved:
        resume = f"resume it (--trainer.resume {directory}), "
    return (
        f"{directory}: there is a run already; {resume}choose another run_name, or replace it "
        "(--trainer.overwrite true)"
    )
