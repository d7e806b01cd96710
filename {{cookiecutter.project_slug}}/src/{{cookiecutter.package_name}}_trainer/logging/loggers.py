"""The loggers CSV file and TensorBoard, and what reads the files of the first."""

import csv
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import one_line
from ..launch import files, output
from .logger import LoggedRun, Logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HEADER = ["step", "epoch", "name", "value"]
_MOST_ROWS, _MOST_BYTES = 5_000_000, 2**29


class CSVLogger(Logger):
    """``metrics.csv``: one row per value (step, epoch, name, value), floats in full precision.

    The speed of training is in ``speed.csv``, so that ``metrics.csv`` can be compared.
    """

    name = "csv"

    def start(self, run: LoggedRun) -> None:
        self._metrics = _Table(run.directory / "metrics.csv")
        self._speed = _Table(run.directory / "speed.csv")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Append rows, which readers see at once."""
        self._metrics.append(step, epoch, values)

    def write_speed(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._speed.append(step, epoch, values)

    def position(self) -> int:
        """Number of bytes in ``metrics.csv``."""
        return self._metrics.file.tell()

    def resume(self, position: int | None, step: int) -> None:
        """Remove the rows that were written after the checkpoint; say if others are missing."""
        path = self._metrics.path
        if position is not None and (size := path.stat().st_size) < position:
            line = f"{path} has {size} bytes, {position} when the checkpoint was saved"
            output.print_once(f"note: {line}: rows up to step {step} may be missing")
        self._metrics.cut(position, step)
        self._speed.cut(None, step)

    def close(self) -> None:
        self._metrics.file.close()
        self._speed.file.close()


class _Table:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def _open(self) -> None:
        self.file = self.path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self.file, lineterminator="\n")
        if self.file.tell() == 0:
            self._rows.writerow(HEADER)

    def append(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if files.is_replaced(self.file.fileno(), self.path):
            self.file.close()
            self._open()  # or raise: the directory was removed, too
            line = f"warning: {self.path} was removed or replaced; later rows are in a new file"
            output.print_lines(line, error=True)
        for name, value in values.items():
            self._rows.writerow((step, epoch, name, repr(value)))
        self.file.flush()

    def cut(self, position: int | None, step: int) -> None:
        """Remove what is after a step, and after a position, if a row ends there."""
        self.file.flush()
        end = _end_of_step(self.path, step)
        with files.opened(self.path) as file:
            file.seek(max(0, (position or 0) - 1))
            if position is not None and file.read(1) == b"\n":
                end = min(end, position)
        self.file.truncate(end)
        self.file.seek(end)


def _end_of_step(path: Path, step: int) -> int:
    """Offset of the end of the last row of a step, or of the last whole row."""
    position = 0
    with files.opened(path) as file:
        for line in iter(partial(file.readline, 2**16), b""):
            number = line.split(b",", 1)[0].strip(b'"')
            # Rows of another form are of another program, which has saved the file.
            if not line.endswith(b"\n") or (number.isdigit() and int(number[:20]) > step):
                break
            position += len(line)
    return position


def read_rows(path: Path, notes: list[str]) -> Iterator[tuple[int, str, str, str]]:
    """Step, epoch, name and value of the rows of a log, which may be cut or damaged.

    ``notes`` gets what is left out.
    """
    damaged: list[int] = []
    rows = csv.reader(files.lines(path, _MOST_BYTES))
    try:
        for row in islice(rows, _MOST_ROWS):
            if rows.line_num == 1 and row == HEADER:
                continue
            try:
                step, epoch, name, value = row
                float(value)
                if not (step.isdecimal() and len(step) < 19):
                    raise ValueError
            except ValueError:
                damaged.append(rows.line_num)
            else:
                yield int(step), epoch, name, value
        if next(rows, None) is not None:
            notes.append(f"{path.name}: more than {_MOST_ROWS:,} rows; the rest is left out")
    except FileNotFoundError:
        notes.append(f"{path.name}: does not exist; the logger csv writes it")
    except (OSError, ValueError, csv.Error) as error:
        notes.append(f"{path.name}: cannot be read to its end ({one_line(error)})")
    if damaged:
        lines = f"{len(damaged)} damaged row{'s' * (len(damaged) > 1)} left out"
        notes.append(f"{path.name}: {lines}, first in line {damaged[0]}")


class TensorBoardLogger(Logger):
    """Event files in ``tensorboard/``; TensorBoard is imported at the first value."""

    name = "tensorboard"
    _writer: "SummaryWriter | None"
    _purge_step: int | None

    def start(self, run: LoggedRun) -> None:
        self._directory = run.directory / "tensorboard"
        self._writer, self._purge_step = None, None

    @property
    def experiment(self) -> "SummaryWriter":
        """TensorBoard's writer of the run: ``add_image``, ``add_figure``, ``add_text`` and more."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # No traceback of TensorBoard's thread, whose error its next call raises.
            self._excepthook = threading.excepthook = partial(_show_of_others, threading.excepthook)
            self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        return self._writer

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.experiment.add_scalar(name, value, step)

    def resume(self, position: int | None, step: int) -> None:
        """Make TensorBoard hide what an earlier process wrote after this step."""
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            if threading.excepthook is self._excepthook:
                threading.excepthook = self._excepthook.args[0]


def _show_of_others(show: Callable[[Any], object], args: Any) -> None:
    if not type(args.thread).__module__.startswith("tensorboard."):
        show(args)
