"""The loggers of the trainer by name: CSV file and TensorBoard."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .base import LoggedRun, Logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class CSVLogger(Logger):
    """``metrics.csv``: one row per value (step, epoch, name, value), floats in full precision."""

    name = "csv"
    _path: Path
    _file: TextIO
    _rows: Any

    def start(self, run: LoggedRun) -> None:
        """Open the file, and continue one that exists."""
        self._path = run.directory / "metrics.csv"
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


BUILT_IN: dict[str, type[Logger]] = {each.name: each for each in (CSVLogger, TensorBoardLogger)}
