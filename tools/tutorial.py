"""Follows the tutorial of a rendered project word by word, as its reader does.

It writes the page's files, runs its commands in one shell and compares what they print.

usage: tutorial.py PAGE FOLDER [STAGE …] [--template FOLDER] [--environment FOLDER]
  PAGE           docs/tutorial.md of a project
  FOLDER         where it is followed; without the stage `setup`, the project's folder
  STAGE          stages to follow, by default `setup files local`
  --template     a checkout that stands for the URL of the template
  --environment  an environment of a project with the same locks, which .venv links to

A block after a paragraph "Save … as `PATH`:" is a file. A block without a language has commands. A
block `text` is all that the commands before it print, errors too. In it

  …                         stands for any text, and alone in a line for any lines;
  decimal numbers           may differ by 2 %, because other CPUs round differently;
  N samples/s, H:MM:SS      may be any number and time;
  job N, job-N and slurm-N  may be any number.

A comment `<!-- tutorial: STAGE -->` names the stage that a section belongs to; others are `local`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

STAGES = ("setup", "files", "local")
URL = "https://github.com/ORG/cookiecutter-distributed-torch"
TOLERANCE = 0.02
PATIENCE = 600.0
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STAGE = re.compile(r"^<!-- tutorial: (\w+) -->$", re.MULTILINE)
SAVED = re.compile(r"(?:^|\n\n)Save [^`]*as\s`([^`]+)`:\n+$")
# What may vary in a line of output. Other numbers are compared as they stand.
VARIES = re.compile(
    r"(?P<any>…)|(?P<whole>\d+(?= samples/s)|(?<=\bjob[- ])\d+|(?<=slurm-)\d+)"
    r"|(?P<time>\d+:\d\d:\d\d)|(?P<decimal>(?<![\d.])\d+\.\d+(?![\d.]))"
)
PATTERNS = {"any": ".*", "whole": r"\d+", "time": r"\d+:\d\d:\d\d", "decimal": r"(\d+\.\d+)"}
DONE = "the shell is ready for the next block: "


class TutorialError(Exception):
    """What a reader of the page would have found."""


@dataclass(frozen=True)
class Block:
    """A block of the page: a file if it has a path, commands if it has no language, else output."""

    stage: str
    language: str
    text: str
    path: str | None
    line: int


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    for match in BLOCK.finditer(page):
        before = page[: match.start()]
        section = before[before.rfind("\n## ") + 1 :]
        marked = STAGE.search(section)
        saved = SAVED.search(before)
        name = marked[1] if marked else "local"
        path = saved[1] if saved else None
        yield Block(name, match[1], match[2], path, before.count("\n") + 1)


def differs(shown: str, printed: str) -> str | None:
    """Return how printed text differs from what the page shows; None if it does not."""
    pattern, decimals = "", list[float]()
    for line in shown.splitlines():
        if line == "…":
            pattern += r"(?:.*\n)*?"
            continue
        end = 0
        for varying in VARIES.finditer(line):
            kind = str(varying.lastgroup)
            pattern += re.escape(line[end : varying.start()]) + PATTERNS[kind]
            decimals += [float(varying[0])] if kind == "decimal" else []
            end = varying.end()
        pattern += re.escape(line[end:]) + r"\n"
    match = re.fullmatch(pattern, printed.rstrip("\n") + "\n")
    if match is None:
        return f"the page shows\n\n{shown}\nand this was printed:\n\n{printed}"
    for expected, number in zip(decimals, map(float, match.groups()), strict=True):
        if abs(number - expected) > TOLERANCE * expected:
            return f"the page shows {expected}, and {number} was printed:\n\n{printed}"
    return None


class Shell:
    """One bash for all blocks, which ends at an error: folder, variables and jobs stay."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, commands: str) -> str:
        """Return what commands print, errors too; a `TutorialError` if one fails."""
        assert self._process.stdin
        assert self._process.stdout
        timer = threading.Timer(PATIENCE, self.end)
        timer.start()
        # A command that reads its input must not read the next block.
        self._process.stdin.write(f'{{\n{commands}\n}} < /dev/null\necho "{DONE}$PWD"\n')
        self._process.stdin.flush()
        printed = ""
        for line in self._process.stdout:
            before, done, folder = line.partition(DONE)
            printed += before
            if done:
                timer.cancel()
                self.folder = Path(folder.rstrip("\n"))
                return printed
        timer.cancel()
        reason = f"a command has failed, or took longer than {PATIENCE:g} s"
        raise TutorialError(f"{reason}:\n\n{printed}")

    def end(self) -> None:
        """End the shell, and what still runs in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _commands(text: str, shell: Shell, venv: Path | None) -> Iterator[str]:
    """Run commands and yield what they print; `.venv` is there before the one that makes it."""
    if venv and "make setup" in text:
        create, text = text.split("make setup", 1)
        yield shell.run(create)
        (shell.folder / ".venv").symlink_to(venv.resolve())
        text = f"make setup{text}"
    yield shell.run(text)


def follow(
    page: Path,
    folder: Path,
    stages: Iterable[str] = STAGES,
    environment: Mapping[str, str] | None = None,
    venv: Path | None = None,
) -> int:
    """Follow stages of a page and return the number of outputs that were as it shows.

    Args:
        page: The tutorial of a rendered project.
        folder: Where the shell starts.
        stages: Names of the stages to follow.
        environment: Variables besides this process' own.
        venv: What `.venv` of the project links to; by default the page's commands create it.

    Raises:
        TutorialError: A command has failed, or has printed something else.
    """
    shell = Shell(folder, os.environ | dict(environment or {}))
    compared, printed = 0, ""
    try:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.stage not in stages:
                continue
            try:
                if block.path:
                    (shell.folder / block.path).write_text(block.text, encoding="utf-8")
                elif not block.language:
                    started = time.monotonic()
                    printed = "".join(_commands(block.text, shell, venv))
                    seconds = time.monotonic() - started
                    print(f"{page.name}:{block.line}: {seconds:.0f} s", flush=True)
                elif problem := differs(block.text, printed):
                    raise TutorialError(problem)
                else:
                    compared += 1
            except TutorialError as error:
                raise TutorialError(f"{page}:{block.line}: {error}") from None
    finally:
        shell.end()
    return compared


def main() -> None:
    """Follow a tutorial as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stages", nargs="*", default=STAGES)
    parser.add_argument("--template", type=Path)
    parser.add_argument("--environment", type=Path)
    words = parser.parse_args()
    environment = {}
    if words.template:  # git asks it instead of the URL
        environment = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": URL}
        environment["GIT_CONFIG_KEY_0"] = f"url.{words.template.resolve()}.insteadOf"
    words.folder.mkdir(parents=True, exist_ok=True)
    try:
        count = follow(words.page, words.folder, words.stages, environment, words.environment)
    except TutorialError as error:
        raise SystemExit(str(error)) from None
    print(f"{words.page}, {' '.join(words.stages)}: {count} outputs are as shown")


if __name__ == "__main__":
    main()
