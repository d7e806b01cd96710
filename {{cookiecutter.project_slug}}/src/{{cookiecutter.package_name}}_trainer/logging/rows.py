"""Read the logs of the CSV logger, which may be cut or damaged."""

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ..errors import one_line
from ..launch import files
from .loggers import HEADER

_MOST_ROWS, _MOST_BYTES = 5_000_000, 2**29


def read_rows(path: Path, notes: list[str]) -> Iterator[tuple[int, str, str, str]]:
    """Step, epoch, name and value of the rows of a log; ``notes`` gets what is left out."""
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
