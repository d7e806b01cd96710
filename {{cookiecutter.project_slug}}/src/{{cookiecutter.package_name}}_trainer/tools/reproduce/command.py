"""Run a recorded run again: which options it gets, and what is printed."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ...checkpoint import run_directory
from ...cli import arguments, config_files, configuration, imports
from ...errors import ConfigurationError, Problems, shown
from ...launch import cluster, is_reported, outcome
from ...options import paths
from . import compare, environment
from .stop import StopAfter

# Options that may differ: where the run is and what it writes, and on what hardware it runs.
_SAFE = (
    *("accelerator", "devices", "num_nodes", "default_root_dir", "run_name", "overwrite", "resume"),
    *("loggers", "enable_progress_bar", "keep_checkpoints", "async_checkpoints"),
)
# Not called again: it would upload checkpoints.
_WITHOUT = "UploadCheckpoints"
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}


class _Given(NamedTuple):
    run: Path
    at: int | None
    trust: bool
    trainer: dict[str, str]
    """Options by name, as text."""


def reproduce(program: str, words: Sequence[str], description: str) -> None:
    """Say what differs from the record, run again, compare, and exit 1 if a step differs.

    Raises:
        ConfigurationError: There is no such run, a script has started it, or an option is wrong.
    """
    given = _read(words, f"{program} reproduce", description)
    attempts = run_directory.attempts(given.run)
    config = config_files.read(str(given.run / "config.yaml"))
    trainer = {**(config.get("trainer") or {})}
    last = _last_step(given, attempts)
    layout = cluster.detect()
    says = layout.is_main and not is_reported()
    fit = _options(given, attempts, trainer, last, layout)
    printed: list[str] = []
    if says:
        count = fit.get("devices", trainer.get("devices"))
        known = environment.here(layout, count if isinstance(count, int) and count > 0 else 1)
        try:
            printed = [
                *environment.of_attempts(given.run, attempts),
                *environment.configured(attempts[-1], trainer),
                *environment.differences(attempts[-1], known),
                *environment.data(attempts[-1]),
            ]
        except (TypeError, ValueError, LookupError, AttributeError):
            raise ConfigurationError(f"{given.run}/run.json: has values of other types") from None
        _say(printed or ["nothing differs from the record"])
    _fit(program, given, fit)
    if says:
        made = Path(fit["default_root_dir"], fit["run_name"])
        now = run_directory.attempts(made)[-1]
        lines = environment.differences(attempts[-1], now)
        verdict = compare.compare(given.run, made, last)
        _say([*(line for line in lines if line not in printed), *verdict.lines])
        if not verdict.is_equal:
            outcome.write(f"failed {verdict.lines[0]}")
            sys.exit(1)


def _say(lines: Sequence[str]) -> None:
    # A run of somebody else may have control characters in its record.
    texts = ("".join(each if each.isprintable() else "?" for each in line) for line in lines)
    print("\n".join(f"reproduce: {text}" for text in texts), flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"reproduce: {message}")


def _read(words: Sequence[str], program: str, description: str) -> _Given:
    safe = ", ".join(f"--trainer.{name}" for name in _SAFE)
    others = f"All options are those of the run; these may be others: {safe}."
    parser = _Parser(prog=program, description=description, epilog=others, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    at = "compare up to this step, and end there"
    parser.add_argument("--at", type=int, metavar="STEP", help=at)
    trust = "let the configuration of the run name classes of the working directory, too"
    parser.add_argument(imports.TRUST, action="store_true", help=trust)
    found, rest = parser.parse_known_args(list(words))
    problems = Problems()
    if words[0].startswith("--"):
        problems.add(f"reproduce: give RUN before its options, not {shown(words[0])}")
    options = {}
    for key, text in arguments.split(rest, problems):
        name = key.removeprefix("trainer.")
        if name in _SAFE and key != name:
            options[name] = text
        else:
            problems.add(f"--{key}: not an option of reproduce, which repeats the run; use: {safe}")
    run = Path(paths.expand("reproduce", found.run))
    problem = f"reproduce {shown(found.run)}: "
    if not run_directory.attempts(run):
        problems.add(f"{problem}no run.json there; give a run directory, such as runs/RUN")
    elif not (run / "config.yaml").is_file():
        problems.add(f"{problem}no config.yaml, because a script has started it; run the script")
    problems.raise_any()
    return _Given(run.absolute(), found.at, found.trust, options)


def _last_step(given: _Given, attempts: Sequence[Mapping[str, Any]]) -> int:
    """The last step to compare.

    Raises:
        ConfigurationError: The run has no such step, or none at all.
    """
    of_ranks = [max(steps) for steps in compare.read(given.run).values() if steps]
    made = attempts[-1].get("last_step")
    last = made if isinstance(made, int) else min(of_ranks, default=0)
    if last < 1:
        raise ConfigurationError(f"reproduce {given.run.name}: the run has made no step")
    if given.at is not None and not 1 <= given.at <= last:
        raise ConfigurationError(f"--at {given.at}: give a step from 1 to {last}, the run's last")
    return last if given.at is None else given.at


def _options(
    given: _Given,
    attempts: Sequence[Mapping[str, Any]],
    trainer: Mapping[str, Any],
    last: int,
    layout: cluster.Layout,
) -> dict[str, Any]:
    """The trainer's options that are not those of ``config.yaml``."""
    recorded = attempts[-1]
    found: dict[str, Any] = {
        "default_root_dir": str(given.run.parent),
        "run_name": f"{given.run.name}-reproduced",
        "loggers": ["csv"],
        "callbacks": [*_callbacks(trainer), _stop(last)],
    }
    if trainer.get("max_time") is not None:
        found["max_time"] = "99999:00:00:00"
    if trainer.get("strategy") == "auto":
        found["strategy"] = recorded.get("strategy")
    if trainer.get("accelerator") == "auto":
        kind = str(recorded.get("device")).partition(":")[0]
        found["accelerator"] = _ACCELERATORS.get(kind, "auto")
    processes = (recorded.get("layout") or {}).get("local_world_size")
    # Strategies of one process per node have another number of devices than processes.
    is_whole_node = recorded.get("strategy") in ("dp", "ddp2")
    if trainer.get("devices") in ("auto", -1, "-1") and isinstance(processes, int):
        found |= {} if layout.started_outside or is_whole_node else {"devices": processes}
    if "run_name" not in given.trainer and "resume" not in given.trainer:
        found["overwrite"] = True  # an earlier reproduction
    found |= {name: config_files.value(name, text) for name, text in given.trainer.items()}
    found["default_root_dir"] = paths.expand("default_root_dir", str(found["default_root_dir"]))
    made = Path(found["default_root_dir"], str(found["run_name"])).absolute()
    if (start := attempts[0].get("resumed_from")) is not None and not run_directory.holds_run(made):
        found["resume"] = start
    if made == given.run:
        raise ConfigurationError(f"run_name={given.run.name}: that is the run itself; give another")
    return found


def _callbacks(trainer: Mapping[str, Any]) -> list[Any]:
    given = trainer.get("callbacks") or []
    names = [each.get("class_path") if isinstance(each, dict) else each for each in given]
    pairs = zip(given, names, strict=True)
    return [each for each, name in pairs if str(name).rpartition(".")[2] != _WITHOUT]


def _stop(last: int) -> dict[str, Any]:
    path = f"{StopAfter.__module__}.{StopAfter.__qualname__}"
    return {"class_path": path, "init_args": {"step": last}}


def _fit(program: str, given: _Given, options: Mapping[str, Any]) -> None:
    """Run ``fit``: in this process, or in ranks that this process starts as copies of itself."""
    words = ["--config", str(given.run / "config.yaml")]
    for name, value in options.items():
        words += [f"--trainer.{name}", value if isinstance(value, str) else json.dumps(value)]
    words += [imports.TRUST] * given.trust
    work = configuration.read_work(program, "fit", words)
    try:
        work.trainer.fit(work.model, work.data)
    except SystemExit as ended:
        if ended.code:  # the launcher of ranks ends with 0, too
            raise
