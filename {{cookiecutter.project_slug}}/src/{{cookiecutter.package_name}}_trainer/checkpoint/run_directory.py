"""The run directory: its name, its record, and the output of its ranks."""

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ConfigurationError
from ..launch import files
from ..launch.cluster import Layout
from ..options import redaction
from . import commit, reading

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RECORD = "run.json"
OVERWRITTEN = "overwritten"
"""Folder of a run that was overwritten, until the new run has saved a checkpoint."""
_OUTPUTS = (
    *("metrics.csv", "speed.csv", "tensorboard", "wandb", "mlflow", "profile"),
    *("checkpoints", "best", "last"),
)
_RECORDS = (
    _RECORD,
    "config.yaml",
    "config.*.yaml",
    "restarts.json",
    "test-step-*.json",
    "validation-step-*.json",
    "predictions-step-*.safetensors",
    "exported-step-*",
)


def check_name(name: str | None) -> None:
    """Raise ConfigurationError if a name is not valid for a run."""
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"run_name={name!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
        )


def create(root: Path, name: str | None) -> Path:
    """Create a run directory.

    Args:
        root: Directory that contains run directories.
        name: Name of the run; an existing directory is reused. Default: a new name with the time.

    Raises:
        ConfigurationError: The directory cannot be created.
    """
    base = name or time.strftime("%Y%m%d-%H%M%S")
    attempt = 1
    while True:
        path = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True, exist_ok=name is not None)
        except FileExistsError:
            if not path.is_dir():
                raise ConfigurationError(f"{path} is a file; it cannot contain runs") from None
            attempt += 1
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be created ({error.strerror})") from None
        else:
            return path


def holds_run(directory: Path) -> bool:
    """Whether a directory contains files of a training run."""
    return any((directory / name).exists() for name in (_RECORD, *_OUTPUTS))


def is_run(directory: Path) -> bool:
    """Whether a directory is a run directory: it has a run's record, or what is loaded as a run."""
    is_loadable = (directory / "config.yaml").exists() and (directory / "checkpoints").is_dir()
    return is_loadable or (directory / _RECORD).exists()


def clear(directory: Path, with_records: bool) -> None:
    """Remove the files of an earlier training run, except the output of its ranks.

    Args:
        directory: The run directory.
        with_records: False keeps ``run.json`` and the other records of earlier attempts.
    """
    for path in _written(directory, with_records):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def set_aside(directory: Path) -> None:
    """Move the files of an earlier training run, as in :func:`clear`, into ``OVERWRITTEN``.

    They stay there until the new run saves its first checkpoint. Until then, files of a later run
    are removed instead: it has failed.
    """
    kept, moving = directory / OVERWRITTEN, directory / f".{OVERWRITTEN}"
    has_saved = bool(reading.complete(directory / reading.DIRECTORY))
    if kept.exists() and not has_saved and not moving.exists():
        clear(directory, with_records=True)
        return
    if found := _written(directory, with_records=True):
        moving.mkdir(exist_ok=True)  # if it exists, a process was killed while it moved files
        for path in found:
            path.rename(moving / path.name)
    if moving.exists():
        shutil.rmtree(kept, ignore_errors=True)
        moving.rename(kept)


def _written(directory: Path, with_records: bool) -> list[Path]:
    patterns = _OUTPUTS + (_RECORDS if with_records else ())
    return [path for pattern in patterns for path in directory.glob(pattern)]


def first_resumed(directory: Path) -> str | None:
    """The checkpoint from which a run started, according to its record; ``None`` if none."""
    attempts = _attempts(directory)
    found = attempts[0].get("resumed_from") if attempts else None
    return found if isinstance(found, str) else None


def _attempts(directory: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads((directory / _RECORD).read_text())["attempts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    is_list = isinstance(found, list) and all(isinstance(each, dict) for each in found)
    return found if is_list else []


def write_record(
    directory: Path, layout: Layout, facts: dict[str, Any], configuration: str | None = None
) -> None:
    """Add an attempt to ``run.json``, with what is needed to reproduce it.

    Environment variables, and options whose name suggests a secret, are not recorded.

    Args:
        directory: The run directory.
        layout: Layout of the processes.
        facts: Further entries.
        configuration: The complete configuration as YAML, for ``config.yaml``; if it differs, that
            of an earlier attempt is kept as ``config.N.yaml``.
    """
    attempts = _attempts(directory)
    if configuration is not None:
        _write_configuration(directory / "config.yaml", configuration, len(attempts))
    attempt = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": redaction.command(sys.argv),
        "git": commit.read(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
        },
        "layout": asdict(layout),
        **facts,
    }
    _write_attempts(directory, [*attempts, attempt])


def record_end(directory: Path, how: str) -> None:
    """Add to ``run.json`` how the last attempt ended, unless that is known."""
    if attempts := _attempts(directory):
        attempts[-1].setdefault("ended", how)
        with contextlib.suppress(OSError):  # it must not replace the error that ended it
            _write_attempts(directory, attempts)


def was_cut_off(directory: Path) -> bool:
    """Whether the last attempt could not record its end: it was killed, or called ``os._exit``."""
    attempts = _attempts(directory)
    return bool(attempts) and "ended" not in attempts[-1]


def _write_attempts(directory: Path, attempts: list[dict[str, Any]]) -> None:
    text = json.dumps({"attempts": attempts}, indent=2)
    files.write_private(directory / _RECORD, f"{text}\n")


def _write_configuration(path: Path, text: str, attempts: int) -> None:
    if attempts and path.is_file() and path.read_text() != text:
        path.rename(path.with_name(f"config.{attempts}.yaml"))
    files.write_private(path, text)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append this process' output, including that of C libraries, to a file in this context."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    originals = [os.dup(1), os.dup(2)]
    _point_output_at([descriptor, descriptor])
    try:
        yield
    finally:
        _point_output_at(originals)


def _point_output_at(descriptors: list[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
    for descriptor in set(descriptors):
        os.close(descriptor)
