"""Prints the size of rendered projects with components left out: lines and files of their Python.

`make renders` runs this file, with the template's folder in PYTHONPATH.

usage: renders_table.py [--test] [NAME ...]
  --test           also runs the quick tests of each, and prints how long they took
  NAME             only these, such as all, none, core or no-deepspeed
  PROJECT_PYTHON   environment: the Python of a project's environment, for --test
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rendering import CORE, ROOT, render

from local_extensions import COMPONENTS

PYTHON = Path(os.environ.get("PROJECT_PYTHON", ROOT / "build" / "venv" / "bin" / "python"))
QUICK = ("-m", "not slow and not gpu")


@dataclass(frozen=True)
class Size:
    """Lines and files of the Python in a folder."""

    lines: int
    files: int

    def __str__(self) -> str:
        return f"{self.lines:,} in {self.files}"


def choices() -> Iterator[dict[str, str]]:
    """Yield answers about parts: all, all but one of each component, none, and the core."""
    yield dict.fromkeys(COMPONENTS, "yes")
    for component in COMPONENTS:
        yield dict.fromkeys(COMPONENTS, "yes") | {component: "no"}
    yield dict.fromkeys(COMPONENTS, "no")
    yield CORE


def kept(answers: dict[str, str]) -> list[str]:
    """Return the components that are included."""
    return [component for component in COMPONENTS if answers[component] == "yes"]


def name_of(answers: dict[str, str]) -> str:
    """Return the name of a render: ``all``, ``none``, ``core``, or what it leaves out."""
    if "parts" in answers:
        return answers["parts"]
    left_out = [f"no-{component}" for component in COMPONENTS if answers[component] == "no"]
    return "none" if len(left_out) == len(COMPONENTS) else "".join(left_out) or "all"


def size(folder: Path) -> Size:
    """Return the size of the Python in a folder, all lines counted."""
    files = sorted(folder.rglob("*.py"))
    return Size(sum(len(file.read_text("utf-8").splitlines()) for file in files), len(files))


def run_tests(project: Path) -> str:
    """Run the quick tests of a project, and return how long they took.

    Raises:
        SystemExit: A test has failed; what pytest has printed comes before.
    """
    started = time.monotonic()
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *QUICK],
        cwd=project,
        env=os.environ | {"PYTHONPATH": "src"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}renders_table.py: {project}: a test failed")
    return f"{time.monotonic() - started:.0f} s, {done.stdout.splitlines()[-1].strip('= ')}"


def main() -> None:
    """Print a row for each choice of components."""
    names = [name_of(answers) for answers in choices()]
    parser = argparse.ArgumentParser()
    parser.add_argument("--test", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"{unknown.pop()} is none of {', '.join(names)}")
    heads = [
        "components",
        "trainer",
        "all of src/",
        "tests/",
        *(["quick tests"] if options.test else []),
    ]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for answers in choices():
        if name_of(answers) not in (options.names or names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            project = render(Path(folder), answers, hooks=True)
            source = project / "src"
            cells = [
                name_of(answers),
                *map(str, map(size, (source / "my_project_trainer", source))),
            ]
            cells += [str(size(project / "tests")), *([run_tests(project)] if options.test else [])]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    os.environ["DISTRIBUTED_TORCH_QUIET"] = "1"
    main()
