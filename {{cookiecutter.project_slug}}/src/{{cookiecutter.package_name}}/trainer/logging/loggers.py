"""Loggers: CSV file and TensorBoard."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..arguments import other_trainers
from ..errors import ConfigurationError, nearest, shown

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Logger(Protocol):
    """Writes the values of a step."""

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write values; ``step`` is the number of optimizer steps so far."""

    def position(self) -> int:
        """Position in the log, for :meth:`resume`."""

    def resume(self, position: int | None, step: int) -> None:
        """Continue the log of an earlier process, without entries made after the checkpoint.

        Args:
            position: Position when the checkpoint was saved; ``None`` if it had no such logger.
            step: Step of the checkpoint.
        """

    def close(self) -> None:
        """Flush buffered values."""


class CSVLogger:
    """``metrics.csv``: one row per value (step, epoch, name, value), floats in full precision."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.csv"
        self._file = self._path.open("a", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._file.write("step,epoch,name,value\n")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Append rows, which readers see at once."""
        for name, value in values.items():
            self._rows.writerow((step, epoch, name, repr(value)))
        self._file.flush()

    def position(self) -> int:
        """Number of bytes written."""
        return self._file.tell()

    def resume(self, position: int | None, step: int) -> None:
        """Remove the rows that were written after the checkpoint."""
        if position is None:
            position = _end_of_step(self._path, step)
        if position <= self._file.tell():
            self._file.truncate(position)
            self._file.seek(position)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _end_of_step(path: Path, step: int) -> int:
    """Offset of the end of the last row of a step."""
    position = 0
    with path.open("rb") as file:
        for index, line in enumerate(file):
            number = line.split(b",", 1)[0]
            if index and not (number.isdigit() and int(number) <= step):
                break
            position += len(line)
    return position


class TensorBoardLogger:
    """Event files in ``tensorboard/``; TensorBoard is imported at the first value."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add scalars."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def position(self) -> int:
        """Unused: event files are purged by step."""
        return 0

    def resume(self, position: int | None, step: int) -> None:
        """Make TensorBoard hide what an earlier process wrote after this step."""
        self._purge_step = step + 1

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


_LOGGERS: dict[str, type[CSVLogger] | type[TensorBoardLogger]] = {
    "csv": CSVLogger,
    "tensorboard": TensorBoardLogger,
}


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigurationError for every unknown or repeated logger."""
    unknown = [name for name in names if name not in _LOGGERS]
    lines = [
        other_trainers.about("loggers", name)
        or f"loggers: {shown(name)} is unknown{nearest(str(name), _LOGGERS)}"
        for name in unknown
    ]
    twice = sorted({name for name in names if names.count(name) > 1} - set(unknown))
    lines += [f"loggers: {name!r} is given twice; give it once" for name in twice]
    if lines:
        raise ConfigurationError(lines)


def make_loggers(names: Sequence[str], directory: Path) -> dict[str, Logger]:
    """Create the loggers of a run directory, by name."""
    return {name: _LOGGERS[name](directory) for name in names}
