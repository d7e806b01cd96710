"""The directory of a run: its name, its record, the output of its ranks."""

import contextlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import commit, distributed, files, redaction
from .checkpoint import resolve
from .cluster import Layout
from .errors import CheckpointError, ConfigurationError, UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: str | None) -> None:
    """Raise ConfigurationError if a run cannot have this name."""
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"run_name={name!r}: use letters, digits, '.', '_' and '-', a letter or digit first"
        )


def create(root: Path, name: str | None) -> Path:
    """Make a run's directory.

    Args:
        root: where runs lie.
        name: of the run; an existing one is gone on with. By default a new one of the time.

    Raises:
        ConfigurationError: the directory cannot be made.
    """
    base = name or time.strftime("%Y%m%d-%H%M%S")
    attempt = 1
    while True:
        path = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True, exist_ok=name is not None)
        except FileExistsError:
            if not path.is_dir():
                raise ConfigurationError(f"{path} is a file; runs cannot lie there") from None
            attempt += 1
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot be made ({error.strerror})") from None
        else:
            return path


@dataclass(frozen=True)
class Chosen:
    """A run's directory, and the checkpoint that it goes on from."""

    directory: Path
    checkpoint: Path | None
    is_same_run: bool


def choose(root: Path, name: str | None, resume: str | None, layout: Layout) -> Chosen:
    """Pick a run's directory and checkpoint, the same on every process.

    Args:
        root: where runs lie.
        name: of the run; by default that of the run that is resumed, or the time.
        resume: a run's directory or a checkpoint; ``"auto"``: the newest of the run ``name``, if
            there is one; ``None``: a fresh start.
        layout: rank 0 of it chooses.

    Raises:
        UserError: there is no such checkpoint, or the directory cannot be made.
    """
    answer: dict[str, str | bool | None] = {}
    if layout.is_main:
        try:
            answer = _choose(root, name, resume)
        except UserError as error:
            answer = {"error": str(error)}
    # Rank 0 alone looks: another might look a moment later, and see another newest checkpoint.
    answer = distributed.broadcast(answer)
    if "error" in answer:
        raise UserError(str(answer["error"]))
    checkpoint = answer["checkpoint"]
    return Chosen(
        Path(str(answer["directory"])),
        Path(str(checkpoint)) if checkpoint else None,
        bool(answer["is_same_run"]),
    )


def _choose(root: Path, name: str | None, resume: str | None) -> dict[str, str | bool | None]:
    checkpoint = None
    if resume == "auto":
        with contextlib.suppress(CheckpointError):
            checkpoint = resolve(root / name) if name else None
    elif resume is not None:
        checkpoint = resolve(resume)
    source = checkpoint.parent.parent if checkpoint else None
    directory = source if source and not name else create(root, name)
    return {
        "directory": str(directory),
        "checkpoint": str(checkpoint) if checkpoint else None,
        "is_same_run": source is not None and directory.resolve() == source.resolve(),
    }


def write_record(directory: Path, layout: Layout, facts: dict[str, Any]) -> None:
    """Write ``run.json``: what is needed to run this again.

    No variable of the environment, and no value of an option whose name says that it is secret.
    """
    record = {
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
    files.write_private(directory / "run.json", json.dumps(record, indent=2) + "\n")


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process prints, C libraries' words included, to a file for a while."""
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
