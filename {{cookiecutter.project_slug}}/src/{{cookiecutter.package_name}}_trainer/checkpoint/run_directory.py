"""The run directory: its name, record, checkpoints and links to them, and output of its ranks."""

import contextlib
import io
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, one_line, refused
from ..launch import files, output
from . import state_file

DIRECTORY = "checkpoints"
PREFIX = "step-"
BEST, LAST = "best", "last"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP = re.compile(r"step-(\d{1,16})")
_RECORD, _DAMAGED = "run.json", "run.damaged.json"
_MOST_BYTES = 2**26
_BEGIN, _BETWEEN = re.compile(r'\s*\{\s*"attempts"\s*:\s*\[\s*'), re.compile(r"\s*,?\s*")
_END = re.compile(r"\]\s*\}\s*")
_TIME = "%Y-%m-%dT%H:%M:%S%z"
OVERWRITTEN = "overwritten"  # folder of a run that was overwritten, until the new one has saved
_OUTPUTS = (
    *("metrics.csv", "speed.csv", "hashes", "tensorboard", "wandb", "mlflow", "profile"),
    *(DIRECTORY, BEST, f"{BEST}-*", LAST),
)
_RECORDS = (
    *(_RECORD, "run.damaged*.json", "config.yaml", "config.*.yaml", "restarts.json", "report.html"),
    *("test-step-*.json", "validation-step-*.json", "predictions-step-*", "exported-step-*"),
)


def check_name(name: str | None) -> None:
    if name is not None and not _NAME.fullmatch(name):
        advice = "use at most 128 letters, digits, '.', '_' and '-', a letter or digit first"
        raise ConfigurationError(f"run_name={name!r}: {advice}")


def create(root: Path, name: str | None) -> Path:
    """Create a run directory, or reuse that of a name; by default the name is new: the time."""
    base = name or time.strftime("%Y%m%d-%H%M%S")
    if "\udc80" <= max(str(root.absolute())) <= "\udcff":  # a byte that is not UTF-8
        raise ConfigurationError(f"default_root_dir={str(root)!r}: give a path that is UTF-8")
    for attempt in itertools.count(1):
        path = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True, exist_ok=name is not None)
            break
        except FileExistsError:
            if not path.is_dir():
                raise ConfigurationError(f"{path} is a file or a dead link, no folder") from None
        except OSError as error:
            raise refused(path, error) from None
    return path


def holds_run(directory: Path) -> bool:
    """Whether a directory contains files of a training run."""
    return any((directory / name).exists() for name in (_RECORD, *_OUTPUTS))


def is_run(directory: Path) -> bool:
    """Whether a directory is a run directory: it has a run's record, or what is loaded as a run."""
    is_loadable = (directory / "config.yaml").exists() and (directory / DIRECTORY).is_dir()
    return is_loadable or (directory / _RECORD).exists()


def clear(directory: Path, with_records: bool) -> None:
    """Remove the files of an earlier training run, except its ranks' output and, maybe, records."""
    for path in _written(directory, with_records):
        files.discard(path)


def keep_overwritten(directory: Path) -> None:
    """Move the files of an earlier training run, as in :func:`clear`, into ``OVERWRITTEN``.

    They stay there until a later run saves a checkpoint; files of one that did not are removed.
    """
    kept, moving = directory / OVERWRITTEN, directory / f".{OVERWRITTEN}"
    has_saved = any((directory / DIRECTORY).glob(f"{PREFIX}*"))
    if kept.exists() and not has_saved and not moving.exists():
        clear(directory, with_records=True)
        return
    if written := _written(directory, with_records=True):
        moving.mkdir(exist_ok=True)  # if it exists, a process was killed while it moved files
        for path in written:
            path.rename(moving / path.name)
    if moving.exists():
        files.discard(kept)
        moving.rename(kept)


def _written(directory: Path, with_records: bool) -> list[Path]:
    patterns = _OUTPUTS + (_RECORDS if with_records else ())
    return [path for pattern in patterns for path in directory.glob(pattern)]


def step_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint directory; -1 if it has another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is that of a checkpoint that has been written to its end."""
    return (path / state_file.FILE).is_file()


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in a directory, oldest first."""
    return [path for path in named(directory) if is_checkpoint(path)]


def before(path: Path) -> list[Path]:
    """Complete checkpoints of earlier steps in the same directory, oldest first."""
    return [other for other in complete(path.parent) if step_of(other) < step_of(path)]


def named(directory: Path) -> list[Path]:
    """Non-empty directories that are named like a checkpoint, oldest first."""
    folders = (path for path in directory.glob(f"{PREFIX}*") if step_of(path) >= 0)
    return sorted((path for path in folders if any(path.glob("*"))), key=step_of)


def is_link(name: str | os.PathLike[str]) -> bool:
    """Whether the name of a checkpoint is that of a link, and not a path."""
    text = str(name)
    return text in (BEST, LAST) or (text.startswith(f"{BEST}-") and not os.path.lexists(text))


def find_link(run: Path, name: str) -> Path:
    """The link to the best or the last checkpoint of a run; ConfigurationError if none."""
    link, reason = run / name, "no checkpoint there"
    if (target := link if link.is_dir() else files.pointed(link)).is_dir():
        return target
    if name != LAST and run.is_dir():
        reason = "the run kept none; train with the callback BestCheckpoint, or use 'last'"
    raise ConfigurationError(f"checkpoint={name!r}: {link}: {reason}")


def write_record(
    directory: Path, attempt: Mapping[str, Any], configuration: str | None = None
) -> str | None:
    """Add an attempt to ``run.json``; a damaged one is kept, and the result says so.

    ``configuration``: as YAML; another one of an earlier attempt is kept as ``config.N.yaml``.
    """
    earlier, damage = read_record(directory)
    record, kept = directory / _RECORD, _unused(directory / _DAMAGED)
    if is_kept := damage is not None and os.path.lexists(record):
        record.replace(kept)
    if configuration is not None:
        path = directory / "config.yaml"
        has_config = (earlier or is_kept) and os.path.lexists(path)
        existing = None
        with contextlib.suppress(OSError, ValueError):  # another one, in any case
            existing = files.read(path, len(configuration.encode()))
        if has_config and existing != configuration.encode():
            path.rename(_unused(directory / f"config.{len(earlier)}.yaml"))
        files.write_atomically(path, configuration, mode=0o600)
    _write_attempts(directory, [*earlier, {"started": time.strftime(_TIME), **attempt}])
    return f"{damage}; kept as {kept.name}" if is_kept else None


def _unused(path: Path) -> Path:
    """A path, or the first one like ``run.damaged-2.json``, that nothing has."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], others) if not os.path.lexists(p))


def extend_record(directory: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to the last attempt in ``run.json``; those that it has are replaced."""
    records, damage = read_record(directory)
    if records and damage is None:
        records[-1] |= facts
        with contextlib.suppress(OSError):  # the directory was removed, or the disk is full
            _write_attempts(directory, records)


def record_end(directory: Path, how: str, facts: Mapping[str, Any]) -> None:
    """Add to ``run.json`` how the last attempt ended, and when, unless that is known."""
    if (records := attempts(directory)) and "ended" not in records[-1]:
        # An OSError must not replace the error that ended it.
        extend_record(directory, {"ended": how, "ended_at": time.strftime(_TIME), **facts})


def was_cut_off(directory: Path) -> bool:
    """Whether the last attempt could not record its end: it was killed, or called ``os._exit``."""
    return any("ended" not in attempt for attempt in attempts(directory)[-1:])


def was_begun_since(directory: Path, moment: float) -> bool:
    """Whether the last attempt was begun at a time or later."""
    with contextlib.suppress(LookupError, TypeError, ValueError):  # no record, or a damaged one
        return datetime.strptime(attempts(directory)[-1]["started"], _TIME).timestamp() >= moment
    return False


def attempts(directory: Path) -> list[dict[str, Any]]:
    """The attempts in ``run.json``, the first one first; none if it is damaged."""
    return read_record(directory)[0]


def read_record(directory: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The attempts in ``run.json`` before any damage, and what is wrong with it."""
    try:
        text = files.read(directory / _RECORD, _MOST_BYTES).decode()
    except FileNotFoundError:
        return [], f"{_RECORD}: does not exist"
    except (OSError, ValueError) as error:
        return [], f"{_RECORD}: cannot be read ({one_line(error)})"
    records: list[dict[str, Any]] = []
    rest = _BEGIN.match(text)
    with contextlib.suppress(ValueError, RecursionError):
        while rest and text.startswith("{", rest.end()):
            record, end = json.JSONDecoder().raw_decode(text, rest.end())
            files.refuse_deep(record)
            records.append(record)
            rest = _BETWEEN.match(text, end)
    is_complete = rest is not None and _END.fullmatch(text, rest.end())
    attempts = f"{len(records)} attempt{'s' * (len(records) != 1)}"
    return records, None if is_complete else f"{_RECORD}: damaged; {attempts} of it can be read"


def _write_attempts(directory: Path, written: Sequence[Mapping[str, Any]]) -> None:
    text = json.dumps({"attempts": written}, indent=2)
    files.write_atomically(directory / _RECORD, f"{text}\n", mode=0o600)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append this process' output, including that of C libraries, to a file in this context."""
    path.parent.mkdir(parents=True, exist_ok=True)
    originals = os.dup(1), os.dup(2)
    with path.open("ab") as log:
        _point_output_at(log.fileno(), log.fileno())
    try:
        # A notebook's stdout and stderr write into a cell, not to the descriptors.
        with contextlib.redirect_stdout(_text(1)), contextlib.redirect_stderr(_text(2)):
            yield
    finally:
        _point_output_at(*originals)
        for original in originals:
            os.close(original)


def _text(descriptor: int) -> io.TextIOWrapper:
    """A stream without a buffer; it is not closed, because handlers of logging may keep it."""
    file = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", write_through=True)


def _point_output_at(stdout: int, stderr: int) -> None:
    output.flush(sys.stdout)
    output.flush(sys.stderr)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
