"""The command ``reproduce``: run a recorded run again, and find the first thing that differs."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...callbacks import Callback
from ...checkpoint import run_directory
from ...cli import arguments, config_files, configuration, imports
from ...errors import ConfigurationError, Problems, shown
from ...launch import cluster, output, reports
from ...module import Run, TrainingModule
from ...options import values
from ...run.rank import RankRun
from . import compare

HELP = "Run a recorded run again, and say what differs first."
_SAFE = (  # options that may differ: where the run is, what it writes, on what hardware
    *("accelerator", "devices", "num_nodes", "default_root_dir", "run_name", "overwrite", "resume"),
    *("loggers", "enable_progress_bar", "keep_checkpoints", "async_checkpoints"),
)


class StopAfter(Callback):
    """Ends the fit after ``step``, on all ranks, as if it had been asked to stop.

    What depends on the number of steps does not change, as it would by ``max_steps``.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        if isinstance(trainer, RankRun) and trainer.global_step >= self.step:
            trainer.position.is_stopped = True


def run(program: str, words: Sequence[str]) -> None:
    """Say what differs from the record, run again, compare; exit 0 only if they are bit-equal."""
    args = _read(words, f"{program} reproduce")
    recorded, trainer = args.attempts[-1], args.recorded_options
    last, layout = _last_step(args), cluster.detect()
    fit = _options(args, layout)
    stop = {"class_path": f"{__name__}.StopAfter", "init_args": {"step": last}}
    fit["callbacks"] = [*(trainer.get("callbacks") or []), stop]
    says = layout.is_main and not reports.is_reported()
    printed: list[str] = []
    if says:
        known = compare.here(layout, trainer | fit)
        try:
            printed += compare.of_run(args.run, args.attempts)
            printed += [*compare.differences(recorded, known), *compare.data(recorded)]
        except (TypeError, ValueError, LookupError, AttributeError):
            raise ConfigurationError(f"{args.run}/run.json: has values of other types") from None
        _say(printed or ["nothing differs from the record"])
    _fit(program, args, fit)
    if says:
        made = Path(fit["default_root_dir"], fit["run_name"])
        lines = compare.differences(recorded, run_directory.attempts(made)[-1])
        is_equal, compared = compare.compare(args.run, made, last)
        _say([*(line for line in lines if line not in printed), *compared])
        if not is_equal:
            reports.write_outcome(f"failed {compared[0]}")
            sys.exit(1)


def _say(lines: Sequence[str]) -> None:
    # A run of somebody else may have control characters in its record.
    texts = ("".join(char if char.isprintable() else "?" for char in line) for line in lines)
    output.print_lines(*(f"reproduce: {text}" for text in texts))


def _read(words: Sequence[str], program: str) -> argparse.Namespace:
    """The arguments, and what is recorded; ``trainer``: given options by name, as text."""
    safe = ", ".join(f"--trainer.{name}" for name in _SAFE)
    others = f"All options are those of the run; these may be others: {safe}."
    parser = arguments.Parser(program, description=HELP, epilog=others, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--at", type=int, metavar="STEP", help="compare up to this step, and end")
    trust = "let the configuration of the run name classes of the working directory, too"
    parser.add_argument(imports.TRUST, action="store_true", help=trust)
    args, rest = parser.parse_known_args(list(words))
    problems = Problems()
    args.trainer = {}
    for key, text in arguments.split(rest, problems):
        name = key.removeprefix("trainer.")
        if name in _SAFE and key != name:
            args.trainer[name] = text
        else:
            problems.add(f"--{key}: not an option of reproduce, which repeats the run; use: {safe}")
    run = Path(values.expand_path("reproduce", args.run))
    problem = f"reproduce {shown(args.run)}: "
    args.run, (args.attempts, damage) = run.absolute(), run_directory.read_record(run)
    if not (run / "run.json").exists():
        problems.add(f"{problem}no run.json there; give a run directory, such as runs/RUN")
    elif damage is not None or not args.attempts:
        problems.add(f"{problem}{damage or 'run.json: empty'}; restore it, or give another run")
    elif not (run / "config.yaml").is_file():
        reason = "a script has started it, or the file was removed"
        problems.add(f"{problem}no config.yaml: {reason}; run the command in run.json again")
    problems.raise_any()
    if not (config := config_files.read(str(run / "config.yaml"))).get("model"):
        raise ConfigurationError(f"{problem}config.yaml names no model: restore the file")
    args.recorded_options = {**(config.get("trainer") or {})}
    return args


def _last_step(args: argparse.Namespace) -> int:
    """The last step to compare; the run must have made it, and have hashes to compare."""
    of_ranks = [max(steps) for steps in compare.read(args.run).values() if steps]
    made = args.attempts[-1].get("last_step")
    last = made if isinstance(made, int) else min(of_ranks, default=0)
    if not of_ranks and made != 0:
        is_off = args.recorded_options.get("record_hashes") is False
        why = "the run had record_hashes false" if is_off else "it is missing, empty or damaged"
        advice = "run fit again, and compare metrics.csv"
        raise ConfigurationError(f"{args.run}/hashes: no hashes to compare: {why}; {advice}")
    if last < 1:
        raise ConfigurationError(f"reproduce {args.run.name}: the run has made no step")
    if args.at is not None and not 1 <= args.at <= last:
        raise ConfigurationError(f"--at {args.at}: give a step from 1 to {last}, the run's last")
    return last if args.at is None else args.at


def _options(args: argparse.Namespace, layout: cluster.Layout) -> dict[str, Any]:
    """The trainer's options that are not those of ``config.yaml``, but for callbacks."""
    recorded, trainer, name = args.attempts[-1], args.recorded_options, args.run.name
    options: dict[str, Any] = {"loggers": ["csv"], "run_name": f"{name}-reproduced"}
    if trainer.get("max_time") is not None:
        options["max_time"] = "99999:00:00:00"
    kind = {"cpu": "cpu", "cuda": "gpu"}.get(str(recorded.get("device")).partition(":")[0], "auto")
    auto = {"strategy": recorded.get("strategy"), "accelerator": kind}
    options |= {name: value for name, value in auto.items() if trainer.get(name) == "auto"}
    # Strategies of one process per node have another number of devices than processes.
    if not (layout.started_outside or recorded.get("strategy") in ("dp", "ddp2")):
        processes = (recorded.get("layout") or {}).get("local_world_size")
        if trainer.get("devices") in ("auto", -1, "-1") and isinstance(processes, int):
            options["devices"] = processes
    if "run_name" not in args.trainer and "resume" not in args.trainer:
        options["overwrite"] = True  # an earlier reproduction
    options |= {name: config_files.word(name, text) for name, text in args.trainer.items()}
    root = str(options.get("default_root_dir", args.run.parent))
    options["default_root_dir"] = values.expand_path("default_root_dir", root)
    try:
        run_directory.check_name(str(options["run_name"]))
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}: give --trainer.run_name NAME") from None
    made = Path(options["default_root_dir"], str(options["run_name"])).absolute()
    if (start := args.attempts[0].get("resumed_from")) and not run_directory.holds_run(made):
        options["resume"] = start
    if made == args.run:
        raise ConfigurationError(f"run_name={name}: that is the run itself; give another")
    return options


def _fit(program: str, args: argparse.Namespace, options: Mapping[str, Any]) -> None:
    """Run ``fit``: in this process, or in ranks that this process starts as copies of itself."""
    words = ["--config", str(args.run / "config.yaml"), *[imports.TRUST] * args.trust]
    for name, value in options.items():
        words += [f"--trainer.{name}", value if isinstance(value, str) else json.dumps(value)]
    work = configuration.read_work(program, "fit", words)
    try:
        work.trainer.fit(work.model, work.data)
    except SystemExit as ended:
        if ended.code:  # the launcher of ranks ends with 0, too
            raise
