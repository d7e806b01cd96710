"""What tests of processes share."""

import os
import time
from pathlib import Path

import psutil
from tests.project import PATIENCE, ROOT


def at_root() -> dict[str, str]:
    """Variables with which a process that works in another folder finds the tests."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths)}


def assert_nothing_left(folder: Path) -> None:
    """No process still has a folder as its working directory, after a moment."""
    deadline = time.monotonic() + PATIENCE
    while left := [
        each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(folder)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
