"""What tests of processes share."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from my_project_trainer.launch import reports
from tests.project import PATIENCE, ROOT, start

T = TypeVar("T")


def at_root() -> dict[str, str]:
    """Variables with which a process that works in another folder finds the tests."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths)}


def told_in(folder: Path) -> dict[str, str]:
    """Variables of a run that is to tell its outcome in a folder."""
    return at_root() | {reports.OUTCOME: str(folder / "outcome")}


@contextlib.contextmanager
def running(
    arguments: Sequence[str | Path],
    folder: Path,
    extra: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> "Iterator[subprocess.Popen[str]]":
    """Start Python in a folder, where it finds the tests; it has ended afterward."""
    process = start(arguments, cwd=folder, extra=at_root() | dict(extra or {}), fresh=fresh)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(is_there: Callable[[], T], process: "subprocess.Popen[str]") -> T:
    """What is there at last, while a process runs."""
    deadline = time.monotonic() + PATIENCE
    while not (value := is_there()):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


def assert_nothing_left(folder: Path) -> None:
    """No process still has a folder as its working directory, after a moment."""
    deadline = time.monotonic() + PATIENCE
    while left := [
        child for child in psutil.process_iter(["cwd"]) if child.info["cwd"] == str(folder)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
