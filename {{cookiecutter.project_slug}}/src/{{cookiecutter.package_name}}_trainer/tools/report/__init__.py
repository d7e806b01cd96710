"""The command ``report``: one HTML page about one or several runs, which needs no network."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ...checkpoint import run_directory
from ...cli import arguments
from ...errors import Problems, UserError, shown
from ...launch import files, output

HELP = "Write a page about runs: curves, speed, where the time goes, restarts."
AFTER_FIT = "report: {program} report {run}"
_PACKAGE = "vl_convert"


def run(program: str, words: Sequence[str]) -> None:
    """Write the page of runs, and print its path; UserError with all errors in ``words``."""
    from . import page, reading

    parser = arguments.Parser(prog=f"{program} report", description=HELP, allow_abbrev=False)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories, such as runs/RUN")
    where = "the page; default: report.html in the first run"
    parser.add_argument("--out", metavar="FILE.html", type=Path, help=where)
    args = parser.parse_args(words)
    paths = list(dict.fromkeys(map(Path, args.runs)))
    file = args.out or paths[0] / "report.html"
    _check(paths, file)
    names = [path.absolute().name for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    text = page.written(list(map(reading.read, paths, names)))
    text = text.encode(errors="replace").decode()  # names of values may be half characters
    try:
        files.write_atomically(file, text)
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); name another by --out FILE.html"
        raise UserError(f"{file}: {problem}") from None
    output.print_lines(f"report written to {files.shown(file, Path.cwd())}")


def _check(paths: Sequence[Path], file: Path) -> None:
    problems = Problems()
    if importlib.util.find_spec(_PACKAGE) is None:
        problems.add("report needs vl-convert-python: pip install vl-convert-python")
    for path in paths:
        if not run_directory.is_run(path):
            reason = "is no run directory" if path.exists() else "does not exist"
            problems.add(f"RUN={shown(str(path))}: {reason}; name one such as runs/RUN")
    if file.suffix != ".html":
        problems.add(f"--out={shown(str(file))}: name a file that ends in .html")
    if file.parent not in paths and not file.parent.is_dir():
        problems.add(f"--out={shown(str(file))}: the directory {file.parent} does not exist")
    problems.raise_any()
