"""Prints the size of a rendered project with each set of engines: lines and files of its Python.

`make renders` runs this file, with the template's folder in PYTHONPATH.

usage: renders_table.py [--time]
  --time           also runs the quick tests of each, and prints how long they took
  PROJECT_PYTHON   environment: the Python of a project's environment, for --time
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rendering import ROOT, render

from local_extensions import ENGINES

PYTHON = Path(os.environ.get("PROJECT_PYTHON", ROOT / "build" / "venv" / "bin" / "python"))
QUICK = ("-m", "not slow and not gpu")


@dataclass(frozen=True)
class Size:
    """Lines and files of the Python in a folder."""

    lines: int
    files: int

    def __str__(self) -> str:
        return f"{self.lines:,} in {self.files}"


def sets_of_engines() -> Iterator[dict[str, str]]:
    """Yield the answers to the questions about engines: each combination, all of them first."""
    for answers in itertools.product(("yes", "no"), repeat=len(ENGINES)):
        yield dict(zip(ENGINES, answers, strict=True))


def kept(answers: dict[str, str]) -> list[str]:
    """Return the engines that are included."""
    return [engine for engine in ENGINES if answers[engine] == "yes"]


def name_of(answers: dict[str, str]) -> str:
    """Return the name of a render: its engines."""
    return "+".join(kept(answers)) or "none"


def size(folder: Path) -> Size:
    """Return the size of the Python in a folder, all lines counted."""
    files = sorted(folder.rglob("*.py"))
    return Size(sum(len(file.read_text("utf-8").splitlines()) for file in files), len(files))


def seconds_of_tests(project: Path) -> str:
    """Run the quick tests of a project, and return how long they took and how they ended."""
    started = time.monotonic()
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *QUICK],
        cwd=project,
        env=os.environ | {"PYTHONPATH": "src"},
        capture_output=True,
        text=True,
    )
    last = done.stdout.strip().splitlines()[-1]
    return f"{time.monotonic() - started:.0f} s: {last.strip('= ')}"


def main() -> None:
    """Print a row for each set of engines."""
    timed = sys.argv[1:] == ["--time"]
    if sys.argv[1:] and not timed:
        raise SystemExit("usage: renders_table.py [--time]")
    heads = ["engines", "trainer", "all of src/", "tests/", *(["quick tests"] if timed else [])]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    with tempfile.TemporaryDirectory() as folder:
        for number, answers in enumerate(sets_of_engines()):
            project = render(Path(folder, str(number)), answers, hooks=True)
            source = project / "src" / "my_project"
            cells = [name_of(answers), *map(str, map(size, (source / "trainer", source)))]
            cells += [str(size(project / "tests")), *([seconds_of_tests(project)] if timed else [])]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    os.environ["DISTRIBUTED_TORCH_QUIET"] = "1"
    main()
