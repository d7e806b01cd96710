"""Read the runs, write the page, and print its path."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ...checkpoint import run_directory
from ...errors import ConfigurationError, Problems, UserError, one_line, shown
from ...launch import files
from . import page, reading

_NAME = "report.html"
_PACKAGE = "vl_convert"


class _Parser(argparse.ArgumentParser):
    """Reports errors like the other commands."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"report: {message}")


def run(program: str, words: Sequence[str], description: str) -> None:
    """Write the page; see :func:`..report.run`."""
    parser = _Parser(prog=f"{program} report", description=description, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories, such as runs/RUN")
    where = f"the page; default: {_NAME} in the first run"
    parser.add_argument("--out", metavar="FILE.html", help=where)
    given = parser.parse_args(words)
    paths = list(dict.fromkeys(Path(each) for each in given.runs))
    out = None if given.out is None else Path(given.out)
    _check(paths, out)
    file = out or paths[0] / _NAME
    text = page.written([reading.read(path) for path in paths])
    try:
        files.write_atomically(file, text)
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({one_line(error)})") from None
    print(f"report written to {files.shown(file, Path.cwd())}", flush=True)


def _check(paths: Sequence[Path], out: Path | None) -> None:
    problems = Problems()
    if importlib.util.find_spec(_PACKAGE) is None:
        problems.add("report needs vl-convert-python: pip install vl-convert-python")
    for path in paths:
        if not run_directory.is_run(path):
            what = "is no run directory" if path.exists() else "does not exist"
            problems.add(f"RUN={shown(str(path))}: {what}; name one such as runs/RUN")
    if out is not None and out.suffix != ".html":
        problems.add(f"--out={shown(str(out))}: name a file that ends in .html")
    if out is not None and not out.parent.is_dir():
        problems.add(f"--out={shown(str(out))}: the directory {out.parent} does not exist")
    problems.raise_any()
