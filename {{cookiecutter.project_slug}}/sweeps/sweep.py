"""Search for the options of `fit` that give the best metric, with Optuna: docs/how-to/sweep.md.

usage: python sweeps/sweep.py FILE           train the trials that are left, one after another
       python sweeps/sweep.py FILE left      check the file; print what is left, and the command
       python sweeps/sweep.py FILE ask JOB   take a trial for a job, and print its options
       python sweeps/sweep.py FILE tell JOB  record how the run of a job ended

slurm/sweep.sh and its jobs call the last three; they print a word per line. Trial N is the run
runs/sweep-NAME/trial-N; study.log there is the study, which machines can share. The values of a
trial depend only on the file, its number and the results before it: an interrupted sweep continues
as if it had not been interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
    from optuna.trial import TrialState
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: {missing.name} is not installed: make optuna") from None

optuna.logging.set_verbosity(optuna.logging.WARNING)
OWN = ("--trainer.run_name", "--trainer.default_root_dir", "--trainer.resume")  # set for each trial
MOST_BYTES, MOST_COMBINATIONS = 2**26, 10_000


class Loader(yaml.SafeLoader):
    """YAML without what it would silently drop or expand: repeated keys, and aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse an alias."""
        peek: Any = self.peek_event  # which has no types
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases are not supported: *{peek().anchor}")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that is given twice."""
        keys = [key.value for key, _ in node.value]
        if twice := [str(key) for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]!r} is given twice")
        return super().construct_mapping(node, deep)


def are_words(values: Any) -> bool:
    """Whether a value is a list of words, each on one line, without options that trials set."""
    return isinstance(values, list) and all(
        isinstance(each, str | int | float | None)
        and not (isinstance(each, float) and not math.isfinite(each))
        and not re.match(f"{'|'.join(OWN)}|.*[\\n\\0]", str(each))
        for each in values
    )


def content(path: Path, last: int = 0) -> str:
    """Return the text of a regular file, or its `last` bytes; ValueError if it is too large."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not path.is_file():
            raise ValueError("is not a regular file")
        file.seek(max(0, path.stat().st_size - last) if last else 0)
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    return found.decode(errors="replace" if last else "strict")


KEYS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "command": (f"a list of options of fit, without {', '.join(OWN)}", are_words),
    "metric": ("the name of a logged value", lambda value: isinstance(value, str)),
    "direction": ("maximize or minimize", lambda value: value in ("maximize", "minimize")),
    "trials": ("an int of at least 1", lambda value: type(value) is int and value > 0),
    "seed": ("an int of at least 0", lambda value: type(value) is int and value >= 0),
    "search": ("options with their values", lambda value: isinstance(value, dict) and value),
}


def text(value: object) -> str:
    """Return a value as it is written in an option."""
    return value if isinstance(value, str) else json.dumps(value)


def options(values: dict[str, Any]) -> list[str]:
    """Return values as options of `fit`."""
    return [f"--{name}={text(value)}" for name, value in values.items()]


def fit(*words: object) -> list[str]:
    """Return the command that trains with these options."""
    (package,) = (path.parent.name for path in Path(__file__).parents[1].glob("src/*/__main__.py"))
    return [sys.executable, "-m", package, "fit", *map(text, words)]


def suggest(trial: optuna.Trial, name: str, space: dict[str, Any]) -> None:
    """Let a trial choose the value of an option; raise TypeError or ValueError if it cannot."""
    if "choices" in space:
        words = space["choices"]
        if not are_words(words) or len(set(map(text, words))) < len(words):
            raise ValueError("choices are different numbers, texts of one line, true, false, null")
        trial.suggest_categorical(name, **space)
    else:  # YAML reads 1e-4 as a text.
        limits = {
            key: float(each) if isinstance(each, str) else each for key, each in space.items()
        }
        if not all(math.isfinite(each) for each in limits.values()):
            raise ValueError("limits are finite numbers")
        is_int = all(type(limits.get(key, 1)) is int for key in ("low", "high", "step"))
        (trial.suggest_int if is_int else trial.suggest_float)(name, **limits)


def problems(given: dict[str, Any], check: bool) -> list[str]:
    """Return a line for each mistake in a file; with `check`, `fit` itself checks its options."""
    found = [
        f"{key}: there is no such key, only {', '.join(KEYS)}" for key in given if key not in KEYS
    ]
    wrong = {key: given.get(key) for key in KEYS if not KEYS[key][1](given.get(key))}
    found += [f"{key}: expected {KEYS[key][0]}, got {value!r}" for key, value in wrong.items()]
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(0)).ask()
    for name, space in given["search"].items() if "search" not in wrong else ():
        try:
            if not re.fullmatch(r"(trainer|model|data)(\.\w+)+", name) or f"--{name}" in OWN:
                raise ValueError("this option cannot be searched")
            suggest(trial, name, space)
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            form = "expected {low: …, high: …} or {choices: […]}"
            found.append(f"search: {name}: {form}: {error}")
    if check and "command" not in wrong:
        command = fit(*given["command"], *options(trial.params), "--print_config")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found += done.stderr.replace("error: ", "").splitlines() if done.returncode else []
    return found


def read(path: Path, check: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the content of a file, and all combinations of choices if it has no `trials`."""
    try:
        given = yaml.load(content(path), Loader)  # noqa: S506 (a safe one)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SystemExit(f"error: {path}: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise SystemExit(f"error: {path}: expected the keys {', '.join(KEYS)}")
    search = given["search"] if isinstance(given.get("search"), dict) else {}
    spaces = [each.get("choices") for each in search.values() if isinstance(each, dict)]
    choices = [each for each in spaces if isinstance(each, list)]
    grid = []
    if "trials" not in given and choices and len(choices) == len(search):
        if (count := math.prod(map(len, choices))) > MOST_COMBINATIONS:
            what = f"search: {count} combinations, more than {MOST_COMBINATIONS}: give `trials`"
            raise SystemExit(f"error: {path}: {what}, or fewer choices")
        grid = [dict(zip(search, each, strict=True)) for each in itertools.product(*choices)]
        given["trials"] = len(grid)
    given.setdefault("seed", 0)
    if found := problems(given, check):
        raise SystemExit("\n".join(f"error: {path}: {each}" for each in found))
    return given, grid


def outcome(run: Path) -> tuple[str, dict[str, Any]]:
    """Return how the newest attempt of a run ended, and its last values."""
    try:
        attempt = json.loads(content(run / "run.json"))["attempts"][-1]
        return str(attempt.get("ended", "killed")), dict(attempt.get("metrics", {}))
    except FileNotFoundError:
        return "before the run began", {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"its run.json is damaged: {error}", {}


def number(value: Any) -> float:
    """Return a metric as a number; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def last_line(log: Path) -> str:
    """Return the last line of a log; that of a job is elsewhere."""
    lines = content(log, last=2**16).split("\n") if log.is_file() else []
    return next(filter(None, map(str.strip, reversed(lines))), "")


def living_jobs() -> set[str]:
    """Return the ids of SLURM's jobs."""
    command = ["squeue", "--noheader", "--array", "--format=%i"]
    try:
        return set(subprocess.check_output(command, text=True).split())
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"error: whether the jobs of trials are over: {error}") from None


def without_torn_line(log: Path) -> JournalFileBackend:
    """Open the log of a study without a last line in which a process was killed.

    Optuna leaves such a line out until it appends the next one to it.
    """
    lock = JournalFileSymlinkLock(str(log))
    lock.acquire()
    try:
        with log.open("a+b") as file:
            size = file.tell()
            file.seek(max(0, size - 2**20))
            if (line := file.read().rpartition(b"\n")[2]) and file.seekable():
                file.truncate(size - len(line))
    finally:
        lock.release()
    return JournalFileBackend(str(log))


class Sweep:
    """The study of a file, and its runs; `alone`: check its options, and repair the study."""

    def __init__(self, path: Path, alone: bool) -> None:
        self.given, grid = read(path, check=alone)
        self.directory = Path("runs", f"sweep-{path.stem}")
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / "study.log"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self.lock = os.fdopen(os.open(self.directory / ".lock", flags, 0o666), "w")
            if alone:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.storage = optuna.storages.JournalStorage(without_torn_line(log))
            about: dict[str, Any] = {"study_name": "sweep", "direction": self.given["direction"]}
            self.study = optuna.create_study(storage=self.storage, load_if_exists=True, **about)
        except BlockingIOError:
            raise SystemExit(f"error: {self.directory}: another sweep trains in it") from None
        except OSError as error:
            raise SystemExit(f"error: {error.filename}: {error.strerror}; remove it") from None
        except (ValueError, LookupError, TypeError) as error:
            what = f"cannot be read ({error}); delete {self.directory}, or restore it"
            raise SystemExit(f"error: {log}: {what}") from None
        # A hash: an option of the command may be a secret. Only `trials` may change.
        content = hashlib.sha256(text(self.given | {"trials": bool(grid)}).encode()).hexdigest()
        if self.study.user_attrs.get("file", content) != content:
            what = "more than `trials` changed since its first trial"
            raise SystemExit(f"error: {path}: {what}: rename it, or delete {self.directory}")
        if alone:
            self.study.set_user_attr("file", content)
            for values in grid[len(self.study.trials) :]:
                self.study.enqueue_trial(values)
            jobs = {trial.user_attrs.get("job", "") for trial in self.running()}
            self.settle(jobs - living_jobs() if jobs - {""} else jobs, is_over=False)

    def running(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that were taken, and have not ended."""
        found: list[optuna.trial.FrozenTrial] = self.study.get_trials(states=(TrialState.RUNNING,))
        return found

    @property
    def left(self) -> int:
        """The number of trials that were not taken."""
        states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
        return max(0, int(self.given["trials"]) - len(states) + states.count(TrialState.WAITING))

    def ask(self, job: str) -> tuple[str, list[str]]:
        """Take a trial; return the name of its run, and its options besides the command."""
        trial = self.study.ask()
        trial.set_user_attr("job", job)
        # A generator for all trials would begin again in each process.
        digest = hashlib.sha256(f"{self.given['seed']} {trial.number}".encode()).hexdigest()
        self.study.sampler = optuna.samplers.TPESampler(seed=int(digest[:8], 16))
        for name, space in self.given["search"].items():
            suggest(trial, name, space)
        chosen, run = options(trial.params), f"trial-{trial.number}"
        print(f"{run}: {shlex.join(chosen)}", file=sys.stderr)
        own = zip(OWN, (run, self.directory, "auto"), strict=True)
        return run, [*chosen, *(f"{name}={value}" for name, value in own)]

    def settle(self, jobs: Collection[str], is_over: bool) -> None:
        """Record how the trials of jobs ended ("": without SLURM); interrupted ones wait.

        `is_over`: a run that did not record how it ended has failed.
        """
        metric, study = self.given["metric"], self.storage.get_study_id_from_name("sweep")
        for trial in self.running():
            if trial.user_attrs.get("job", "") not in jobs:
                continue
            run = self.directory / f"trial-{trial.number}"
            said, metrics = outcome(run)
            is_finished = said.startswith("finished")
            if is_finished and metric not in metrics:
                raise SystemExit(f"error: metric {metric}: {run} has only {', '.join(metrics)}")
            value = number(metrics[metric]) if is_finished else math.nan
            if math.isfinite(value):
                said = f"{metric} {value:.6g}"
                self.study.tell(trial.number, value)
            elif is_finished or (is_over and not said.startswith("preempted")):
                why = last_line(run.with_suffix(".log")) or said
                said = f"failed: {f'{metric} is {value}' if is_finished else why}"
                self.study.tell(trial.number, state=TrialState.FAIL)
            else:
                said = "interrupted"
                id = self.storage.get_trial_id_from_study_id_trial_number(study, trial.number)
                self.storage.set_trial_state_values(id, TrialState.WAITING)
            print(f"{run.name}: {said}", file=sys.stderr)

    def train(self) -> int:
        """Train the trials that are left, until a signal; return the exit code."""
        child: subprocess.Popen[bytes] | None = None
        signals: list[int] = []

        def stop(number: int, _: object) -> None:
            signals.append(number)
            if child:
                child.send_signal(number)

        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, stop)
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        # Signals come from here only, and a run that outlives this process keeps the lock.
        how |= {"start_new_session": True, "pass_fds": [self.lock.fileno()]}
        while self.left and not signals:
            run, words = self.ask("")
            with (self.directory / f"{run}.log").open("ab") as log:
                child = subprocess.Popen(fit(*self.given["command"], *words), stdout=log, **how)
            if signals:  # before there was a child
                child.send_signal(signals[0])
            child.wait()
            self.settle({""}, is_over=not signals)
        self.report()
        return 128 + signals[0] if signals else 0

    def report(self) -> None:
        """Print the numbers of trials, and the best one."""
        trials = self.study.get_trials()
        counts = {state: sum(each.state == state for each in trials) for state in TrialState}
        ended, failed = counts[TrialState.COMPLETE], counts[TrialState.FAIL]
        print(f"trials: {ended} finished, {failed} failed, {self.left} left; {self.directory}")
        if ended:
            best = self.study.best_trial
            print(f"best: trial-{best.number}, {self.given['metric']} {best.value:.6g}:")
            print(shlex.join(options(best.params)))


def main() -> None:
    """Run the command."""
    match sys.argv[1:]:
        case [file]:
            sys.exit(Sweep(Path(file), alone=True).train())
        case [file, "left"]:
            sweep = Sweep(Path(file), alone=True)
            print(sweep.left, *map(text, sweep.given["command"]), sep="\n")
        case [file, "ask", job]:
            sweep = Sweep(Path(file), alone=False)
            sweep.settle({job}, is_over=False)  # it may have been requeued
            if sweep.left:
                print(*sweep.ask(job)[1], sep="\n")
        case [file, "tell", job]:
            Sweep(Path(file), alone=False).settle({job}, is_over=True)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
