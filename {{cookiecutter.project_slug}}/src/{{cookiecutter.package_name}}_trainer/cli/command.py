"""The command line: ``fit``, ``validate``, ``test``, ``predict``, ``find_…``, ``export``."""

import contextlib
import importlib.metadata
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigurationError, UserError, nearest, shorten
from ..launch import cluster, failures, files, output, rank, reports, signals
from . import configuration, export, imports

HELP = {**configuration.COMMANDS, export.COMMAND: export.HELP}
_TOOLS = Path(__file__).parents[1] / "tools"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command (default: of this process' command line).

    Exits with 0, 1 after a failure, 2 after a user error, 75 if it is temporary, 130 after Ctrl-C.
    """
    words = cluster.without_appended(sys.argv[1:] if arguments is None else arguments)
    # So that a console script finds the user's classes, too; last, because its files must not
    # shadow installed modules. As in Python, -P and PYTHONSAFEPATH disable it.
    here = str(Path.cwd())
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.append(here)
    rank.drop_inherited_variables()
    reports.make_outcome_absolute(Path.cwd())
    with imports.checked():
        try:
            _run(words)
        except KeyboardInterrupt as interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the cleanup
            shows = True
            with contextlib.suppress(ConfigurationError):  # reported already where a run begins
                shows = cluster.detect().is_main
            _end(str(interrupt) or signals.INTERRUPTED, signals.INTERRUPTED_CODE, shows=shows)
        except Exception as error:
            if reports.is_reported():
                failures.report_failure(error)
            _end(failures.describe(error), reports.exit_code(error))


def _run(words: list[str]) -> None:
    program = files.PACKAGE.replace("_", "-")
    if not words or words[0] in ("-h", "--help"):
        output.print_lines(_usage(program), is_result=True)
        return
    if words == ["--version"]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            output.print_lines(f"{program} {importlib.metadata.version(program)}", is_result=True)
            return
        raise UserError(f"--version: {program} is not installed: make setup")
    command, rest = words[0], words[1:]
    if command in (tools := _tools()):
        _tool(command).run(program, rest)
        return
    if command not in HELP:
        similar = "; use torchrun" * ("--local" in command) or nearest(command, [*HELP, *tools])
        raise ConfigurationError(f"{shorten(repr(command))} is not a command{similar}")
    if command == export.COMMAND:
        export.run(program, rest)
        return
    work, started_in = configuration.read_work(program, command, rest), Path.cwd()
    _COMMANDS[command](work)
    run, shows = work.trainer.run_directory, work.trainer.enable_progress_bar
    if command == "fit" and run and shows and work.trainer.global_rank == 0:
        quoted = shlex.quote(str(files.shown(started_in / run, started_in)))
        for name in tools:
            if line := getattr(_tool(name), "AFTER_FIT", None):
                output.print_lines(line.format(program=program, run=quoted))


def _score(work: configuration.Work, evaluate: Callable[..., dict[str, float]], stage: str) -> None:
    metrics = evaluate(work.model, work.data, **work.weights)
    if work.trainer.global_rank == 0:
        work.results.write_metrics(stage, metrics)


def _predict(work: configuration.Work) -> None:
    outputs = work.trainer.predict(work.model, work.data, **work.weights)
    named = outputs if isinstance(outputs, dict) else {"predictions": outputs}
    if all(output is None for outputs in named.values() for output in outputs):
        raise UserError("predict_step returned None for every batch: there is nothing to write")
    if work.trainer.global_rank == 0:
        work.results.write_predictions(outputs)


_COMMANDS: dict[str, Callable[[configuration.Work], object]] = {
    "fit": lambda work: work.trainer.fit(work.model, work.data),
    "validate": lambda work: _score(work, work.trainer.validate, "validation"),
    "test": lambda work: _score(work, work.trainer.test, "test"),
    "predict": _predict,
    "find_batch_size": lambda work: work.trainer.find_batch_size(work.model, work.data),
    "find_learning_rate": lambda work: work.trainer.find_learning_rate(work.model, work.data),
}


def _tools() -> list[str]:
    """Commands in folders of ``tools/``, of which each may be deleted."""
    return sorted(path.parent.name for path in _TOOLS.glob("*/__init__.py"))


def _tool(command: str) -> Any:
    return importlib.import_module(f"..tools.{command}", __package__)


def _usage(program: str) -> str:
    lines = [f"usage: {program} COMMAND [--config FILE] [--trainer.OPTION VALUE] …"]
    lines += [f"       {program} {export.COMMAND} RUN --format NAME", ""]
    commands = HELP | {command: _tool(command).HELP for command in _tools()}
    lines += [f"  {command:20}{text}" for command, text in commands.items()]
    return "\n".join([*lines, "", f"'{program} COMMAND --help' lists every option."])


def _end(text: str, code: int, *, shows: bool = True) -> NoReturn:
    reports.write_failed(text)  # unless the run has written that it saved
    if shows and not reports.is_reported():
        output.print_lines(text, error=True)
    sys.exit(code)
