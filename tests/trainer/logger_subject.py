"""Loggers of a user: one that keeps lines in a file, and those that fail.

``python -m logger_subject OPTIONS [GROUP]`` fits with these options, in JSON; step 3 kills the
process group GROUP.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
from my_project_trainer import Callback, LoggedRun, Logger

import callback_subject


class Lines(Logger):
    """Appends each value to ``lines.txt``, and what else is called to ``calls.txt``."""

    def __init__(self, prefix: str = "", api_key: str | None = None) -> None:
        self.prefix, self.api_key = prefix, api_key

    def start(self, run: LoggedRun) -> None:
        self._path = run.directory / f"{self.name}.txt"
        self._told(f"start {run.name}")
        (run.directory / "configuration.json").write_text(json.dumps(run.configuration))

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{step} {epoch} {self.prefix}{name}\n" for name in values)

    def position(self) -> int:
        return self._path.stat().st_size

    def resume(self, position: int | None, step: int) -> None:
        self._told(f"resume {position} {step}")
        if position is not None:
            with self._path.open("r+") as file:
                file.truncate(position)

    def close(self) -> None:
        self._told("close")

    def _told(self, line: str) -> None:
        with (self._path.parent / "calls.txt").open("a") as file:
            file.write(f"{line}\n")


class Fails(Logger):
    def __init__(self, method: str) -> None:
        self.method, self.calls = method, 0

    def _call(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            raise OSError(28, "No space left on device", "log")

    def start(self, run: LoggedRun) -> None:
        self._call("start")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._call("write")

    def position(self) -> int:
        self._call("position")
        return 0

    def resume(self, position: int | None, step: int) -> None:
        self._call("resume")

    def close(self) -> None:
        self._call("close")


class Mute(Logger):
    """Has no ``write``."""


class Older(Logger):
    def write(self, metrics: dict[str, float]) -> None:  # type: ignore[override]
        pass


class Bare(Logger):
    def __init__(self, kept: Any = None) -> None:
        self.kept: list[tuple[int, int, dict[str, float]]] = []

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self.kept.append((step, epoch, dict(values)))


def lines(directory: Path, name: str = "Lines") -> list[str]:
    """What ``Lines`` has written, without the speed."""
    written = (directory / f"{name}.txt").read_text().splitlines()
    return [line for line in written if "speed/" not in line]


class Kills(Callback):
    def __init__(self, group: int) -> None:
        self.group = group

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 3:
            os.killpg(self.group, signal.SIGKILL)


if __name__ == "__main__":
    options, *groups = map(json.loads, sys.argv[1:])
    callbacks = [Kills(group) for group in groups]
    trainer.Trainer(**options, callbacks=callbacks).fit(callback_subject.Net())
