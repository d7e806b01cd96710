"""CSV file and TensorBoard; the loggers of the trainer by name, and how they are created."""

import csv
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, Problems, shown
from ..launch import side_files
from ..options import class_paths
from .logger import LoggedRun, Logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HEADER = ["step", "epoch", "name", "value"]


class CSVLogger(Logger):
    """``metrics.csv``: one row per value (step, epoch, name, value), floats in full precision.

    The speed of training is in ``speed.csv``, so that ``metrics.csv`` can be compared.
    """

    name = "csv"
    _metrics: "_Table"
    _speed: "_Table"

    def start(self, run: LoggedRun) -> None:
        """Open the files, and continue those that exist."""
        self._metrics = _Table(run.directory / "metrics.csv")
        self._speed = _Table(run.directory / "speed.csv")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Append rows, which readers see at once."""
        self._metrics.append(step, epoch, values)

    def write_speed(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Append rows to ``speed.csv``."""
        self._speed.append(step, epoch, values)

    def position(self) -> int:
        """Number of bytes in ``metrics.csv``."""
        return self._metrics.file.tell()

    def resume(self, position: int | None, step: int) -> None:
        """Remove the rows that were written after the checkpoint."""
        self._metrics.cut(_end_of_step(self._metrics.path, step) if position is None else position)
        self._speed.cut(_end_of_step(self._speed.path, step))

    def close(self) -> None:
        """Close the files."""
        self._metrics.file.close()
        self._speed.file.close()


class _Table:
    """A CSV file with one row per value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("a", newline="")
        self._rows = csv.writer(self.file, lineterminator="\n")
        if self.file.tell() == 0:
            self._rows.writerow(HEADER)

    def append(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._rows.writerow((step, epoch, name, repr(value)))
        self.file.flush()

    def cut(self, position: int) -> None:
        if position <= self.file.tell():
            self.file.truncate(position)
            self.file.seek(position)


def _end_of_step(path: Path, step: int) -> int:
    """Offset of the end of the last row of a step."""
    position = 0
    with side_files.opened(path) as file:
        for index, line in enumerate(iter(partial(file.readline, 2**16), b"")):
            number = line.split(b",", 1)[0]
            if index and not (number.isdigit() and int(number[:20]) <= step):
                break
            position += len(line)
    return position


class TensorBoardLogger(Logger):
    """Event files in ``tensorboard/``; TensorBoard is imported at the first value."""

    name = "tensorboard"
    _directory: Path
    _writer: "SummaryWriter | None"
    _purge_step: int | None

    def start(self, run: LoggedRun) -> None:
        """Select the directory."""
        self._directory = run.directory / "tensorboard"
        self._writer, self._purge_step = None, None

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add scalars."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # No traceback of TensorBoard's thread, whose error its next call raises.
            threading.excepthook = partial(_show_of_others, threading.excepthook)
            self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def resume(self, position: int | None, step: int) -> None:
        """Make TensorBoard hide what an earlier process wrote after this step."""
        self._purge_step = step + 1

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


def _show_of_others(show: Callable[[Any], object], args: Any) -> None:
    if not type(args.thread).__module__.startswith("tensorboard."):
        show(args)


BUILT_IN = {
    "csv": f"{__name__}.CSVLogger",
    "tensorboard": f"{__name__}.TensorBoardLogger",
    "wandb": f"{__package__}.remote_loggers.WandbLogger",
    "mlflow": f"{__package__}.remote_loggers.MLflowLogger",
}
"""Their class paths by name: a file is imported when one of them is used."""


def create(given: object, problems: Problems) -> dict[str, Logger]:
    """Create the loggers of the trainer's option, by name; ``problems``: one line per error."""
    if isinstance(given, Logger):
        given = [given]
    if not isinstance(given, list | tuple):
        problems.add(f"loggers={shown(given)}: give a list of loggers, or of names")
        return {}
    made: dict[str, Logger] = {}
    for index, each in enumerate(given):
        with problems:
            logger = _create(f"loggers[{index}]", each)
            if (first := made.get(logger.name)) is not None:
                is_same = first is logger or _is_built_in(type(logger))
                what = f"{logger.name!r} is given twice; give it once"
                other = f"two are named {logger.name!r}; give each its own name"
                raise ConfigurationError(f"loggers: {what if is_same else other}")
            made[logger.name] = logger
    return made


def _create(where: str, given: object) -> Logger:
    entry, named = given, {}
    if isinstance(given, Mapping):
        entry = dict(given)
        named = {"name": entry.pop("name")} if "name" in entry else {}
    logger = class_paths.create(where, entry, Logger, BUILT_IN)
    kind = type(logger)
    if kind.write is Logger.write:
        raise ConfigurationError(f"{where}: {kind.__name__} has no write(step, epoch, values)")
    name = named.get("name", logger.name or kind.__name__)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{where}.name={shown(name)}: expected str")
    if _is_built_in(kind) and name != kind.name:
        raise ConfigurationError(f"{where}.name={name!r}: it is always {kind.name!r}")
    logger.name = name
    return logger


def _is_built_in(kind: type[Logger]) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" in BUILT_IN.values()
