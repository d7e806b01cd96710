"""Search for the options of `fit` that give the best metric, with Optuna: docs/how-to/sweep.md.

usage: python sweeps/sweep.py FILE            train the trials that are left, one after another
       python sweeps/sweep.py FILE left …     check the file; print what is left, and the command
       python sweeps/sweep.py FILE ask JOB …  take a trial for a job, and print its options
       python sweeps/sweep.py FILE tell JOB   record how the run of a job ended

slurm/sweep.sh and its jobs call the last three, with options of fit (…); they print a word per
line. Trial N is the run runs/sweep-NAME/trial-N, and study.log there is the study.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    from my_project.__main__ import interrupt

    signal.signal(signal.SIGINT, interrupt)
try:
    import optuna
    from optuna.storages import JournalStorage, journal
    from optuna.trial import TrialState as State
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: {missing.name} is not installed: make optuna") from None

from my_project_trainer import errors
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.cli import arguments, config_files
from my_project_trainer.launch import failures, signals
from my_project_trainer.options import values

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # PartialFixedSampler
FIT = [sys.executable, "-m", "my_project", "fit"]
CHECK = """import json, sys
from my_project_trainer.cli import main
code = 0
for words in json.load(sys.stdin):  # in one process, as torch takes seconds to import
    try: code == 130 or main(["fit", *words, "--print_config=unchecked"])
    except SystemExit as end: code = end.code or code
sys.exit(code)"""
OPTION = re.compile(r"(trainer|model|data)(\.\w+)+")
OWN = ("trainer.run_name", "trainer.default_root_dir", "trainer.resume", "trainer.overwrite")
NO_WORD = re.compile(f"--({'|'.join(OWN)})|.*[\\n\\0]|-?inf$|nan$")
ERROR = r"^(rank [0-9]+: )?(error: |[A-Za-z0-9_.]*(Error|Exception)(:|$))"  # notes may follow


def are_words(value: Any) -> bool:
    """Whether a value is a list of words, each on one line, without options that trials set."""
    types = list[str | bool | int | float | None]
    return values.fits(types, value) and not any(NO_WORD.match(str(word)) for word in value)


KEYS: dict[str, Any] = {
    "command": Annotated[list, values.Range(f"of options of fit, not {', '.join(OWN)}", are_words)],
    "metric": str,
    "direction": Literal["maximize", "minimize"],
    "trials": values.PositiveInt,
    "seed": values.NonNegativeInt,
    "search": Annotated[dict[str, Any], values.Range("that is not empty", bool)],
}


def text(value: object) -> str:
    """Return a value as it is written in an option."""
    return value if isinstance(value, str) else json.dumps(value)


def options(chosen: dict[str, Any]) -> list[str]:
    """Return values as options of `fit`."""
    return [f"--{name}={text(value)}" for name, value in chosen.items()]


def distribution(name: str, space: dict[str, Any]) -> Any:
    """Return what an option is drawn from; raise TypeError or ValueError if there is no such."""
    if not OPTION.fullmatch(name) or name in OWN:
        raise ValueError("this option cannot be searched")
    if words := space.get("choices"):
        if not are_words(words) or len({"", *map(text, words)}) <= len(words):
            raise ValueError("choices differ: numbers, text lines (not '', nan), true, false, null")
        return optuna.distributions.CategoricalDistribution(**space)
    if not all(map(math.isfinite, space.values())):
        raise ValueError("limits are finite numbers")
    kind = "Int" if all(type(space[key]) is int for key in space.keys() - {"log"}) else "Float"
    with warnings.catch_warnings(action="error", category=UserWarning):  # of an odd step
        return getattr(optuna.distributions, f"{kind}Distribution")(**space)


def read(path: Path, more: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return a file's content, what its options are drawn from, and whether it is a grid."""
    # `fit` checks its options with `more`, unless that is None. ConfigurationError: its mistakes.
    given = {"seed": 0} | values.plain(config_files.read_file(str(path), path))
    lists, space, ends, problems = dict[str, dict[str, list[Any]]], {}, {}, errors.Problems()
    if is_grid := "trials" not in given and values.fits(lists, given.get("search")):
        given["trials"] = math.prod(len(one.get("choices", [])) for one in given["search"].values())
    given = values.convert(f"{path}: ", KEYS, dict.fromkeys(KEYS) | given, problems, values.fitting)
    for name, each in given.get("search", {}).items():
        try:
            if (short := name.replace(".init_args.", ".")) in given["search"].keys() - {name}:
                raise ValueError(f"it is {short}, which is searched, too")
            space[name] = distribution(name, each)
            ends[name] = each.get("choices") or [space[name].low, space[name].high]
        except (ArithmeticError, AttributeError, TypeError, ValueError, UserWarning) as error:
            why = "" if type(error) is AttributeError else f": {error}".partition(". It will")[0]
            line = f"{path}: search: {name}: expected {{low: …, high: …}} or {{choices: […]}}{why}"
            problems.add(line)
    given["command"] = [text(word) for word in given.get("command", [])]
    if more is not None:
        words, most = [*given["command"], *more], max(map(len, ends.values()), default=1)
        drawn = [{name: end[n % len(end)] for name, end in ends.items()} for n in range(most)]
        argv, stdin = [sys.executable, "-c", CHECK], json.dumps([words + options(d) for d in drawn])
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
        for line in dict.fromkeys(done.stderr.splitlines()) if done.returncode else ():
            problems.add(f"{path}: {line.removeprefix('error: ')}")
    problems.raise_any()
    return given, space, is_grid


def living_jobs() -> set[str]:
    """Return the ids of SLURM's jobs."""
    command = ["squeue", "--noheader", "--array", "--format=%i"]
    # Not as the user's shell shows jobs: SQUEUE_PARTITION would leave some out.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("SQUEUE_")}
    try:
        return set(subprocess.check_output(command, text=True, env=environment).split())
    except (OSError, subprocess.CalledProcessError) as error:
        raise errors.ConfigurationError(f"whether the jobs of trials are over: {error}") from None


class Lock(journal.JournalFileOpenLock):  # type: ignore[misc]
    """Held while lines are appended to a log; removes a last line that a kill left unfinished."""

    # Optuna's readers skip such a line, but could not read what is appended to it.
    def __init__(self, log: Path) -> None:
        super().__init__(str(log))
        self.log = log

    def acquire(self) -> bool:
        """Wait for the lock."""
        super().acquire()
        with self.log.open("r+b") as file:
            start = file.seek(max(0, file.seek(0, os.SEEK_END) - 2**20))
            file.truncate(start + file.read().rfind(b"\n") + 1)
        return True


class Sweep:
    """The study of a file; `alone`: check options and trials; `words`: more options, or a job's."""

    def __init__(self, path: Path, alone: bool, words: Sequence[str] = ()) -> None:
        self.given, self.space, self.is_grid = read(path, words if alone else None)
        self.directory = Path("runs", f"sweep-{path.stem}")
        log = self.directory / "study.log"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self.lock = os.fdopen(os.open(self.directory / ".lock", flags, 0o666), "w")
            if alone:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if log.exists() and not log.is_file():
                raise ValueError("is not a regular file")
            self.storage = JournalStorage(journal.JournalFileBackend(str(log), Lock(log)))
            how = {"direction": self.given["direction"], "load_if_exists": True}
            self.study = optuna.create_study(storage=self.storage, study_name="sweep", **how)
        except BlockingIOError:
            line = f"{self.directory}: another sweep trains in it"
            raise errors.ConfigurationError(line) from None
        except OSError as error:
            raise errors.refused(error.filename, error) from None
        except (ValueError, LookupError, TypeError) as error:
            line = f"{log}: cannot be read ({error}); delete {self.directory}, or restore it"
            raise errors.ConfigurationError(line) from None
        # Hashes: an option may be a secret. `trials` may change, and `metric` until it has a value.
        words = [*self.given["command"], *words] if alone else words
        pairs = arguments.split(words, errors.Problems())
        configs = [config_files.read(value) for key, value in pairs if key == "config"]
        rest = {"metric": None, "trials": self.is_grid, "command": words}
        contents = (f"{text(self.given | rest)} {configs}", self.given["metric"])
        now = [hashlib.sha256(content.encode()).hexdigest() for content in contents]
        trains, metric = self.study.user_attrs.get("digests", now)
        if (words and trains != now[0]) or (metric != now[1] and self.found(State.COMPLETE)):
            line = f"{path}, or a config file or option: more than `trials` changed since its first"
            raise errors.ConfigurationError(f"{line} trial: rename it, or delete {self.directory}")
        if alone or metric != now[1]:  # also before a job tells a trial's value
            self.study.set_user_attr("digests", [trains, now[1]])
        if alone:
            jobs = {trial.user_attrs.get("job", "") for trial in self.found(State.RUNNING)}
            self.settle(jobs - living_jobs() if jobs - {""} else jobs, is_over=False)

    def found(self, state: State) -> list[optuna.trial.FrozenTrial]:
        """The trials in a state."""
        return list(self.study.get_trials(states=[state]))

    @property
    def left(self) -> int:
        """The number of trials that were not taken."""
        taken = len(self.study.trials) - len(self.found(State.WAITING))
        return max(0, int(self.given["trials"]) - taken)

    def ask(self, job: str) -> tuple[str, list[str]]:
        """Take a trial; return the name of its run, and its options besides the command."""
        trial = self.study.ask()
        trial.set_user_attr("job", job)
        # A generator for all trials would begin again in each process.
        digest = hashlib.sha256(f"{self.given['seed']} {trial.number}".encode()).hexdigest()
        self.study.sampler = optuna.samplers.TPESampler(seed=int(digest[:8], 16))
        if self.is_grid:
            rest, fixed = trial.number, {}
            for name, each in reversed(self.space.items()):  # the last option changes first
                rest, index = divmod(rest, len(each.choices))
                fixed[name] = each.choices[index]
            self.study.sampler = optuna.samplers.PartialFixedSampler(fixed, self.study.sampler)
        for name, each in self.space.items():
            trial._suggest(name, each)
        run = f"trial-{trial.number}"
        print(f"{run}: {shlex.join(options(trial.params))}", file=sys.stderr)
        own = dict(zip(OWN, (run, str(self.directory), "auto", "false"), strict=True))
        return run, options(trial.params | own)

    def settle(self, jobs: Collection[str], is_over: bool) -> None:
        """Record how the trials of jobs ended ("": without SLURM); interrupted ones wait."""
        # `is_over`: a run that did not record how it ended has failed.
        metric = self.given["metric"]
        for trial in [t for t in self.found(State.RUNNING) if t.user_attrs.get("job", "") in jobs]:
            run = self.directory / f"trial-{trial.number}"
            attempts, damage = run_directory.read_record(run)
            said, value = damage or attempts[-1].get("ended", "killed, or os._exit"), math.nan
            if is_finished := said.startswith("finished"):
                metrics = attempts[-1]["metrics"]
                lack = f"metric {metric}: {run} has only {', '.join(metrics)}"
                if metric not in metrics and not self.found(State.COMPLETE):
                    raise errors.ConfigurationError(f"{lack}; name one of them")
                value = float(metrics.get(metric, value))  # or a text: "nan"
                said = f"{metric} {value:.6g}" if metric in metrics else lack
            if math.isfinite(value):
                self.study.tell(trial.number, value)
            elif is_finished or (is_over and not said.startswith("preempted")):
                grep = ["grep", "-aE", ERROR, f"{run}.log"]  # that of a job is elsewhere
                done = subprocess.run(grep, capture_output=True, check=False, errors="replace")
                why = "" if is_finished else done.stdout.strip().rpartition("\n")[2]
                said = f"failed: {why or said}"
                self.study.tell(trial.number, state=State.FAIL)
            else:
                said = "interrupted"
                self.storage.set_trial_state_values(trial._trial_id, State.WAITING)
            print(f"{run.name}: {said}", file=sys.stderr)

    def train(self) -> int:
        """Train the trials that are left, until a signal; print the best; return the exit code."""
        stop, received = 0, queue.SimpleQueue[int]()
        for number in [n for n in signals.SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]:
            signal.signal(number, lambda number, _: received.put(number))
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        # Signals come from here only, and a run that outlives this process keeps the lock.
        how |= {"start_new_session": True, "pass_fds": [self.lock.fileno()]}
        while self.left and not stop:
            run, words = self.ask("")
            with (self.directory / f"{run}.log").open("ab") as log:
                child = subprocess.Popen([*FIT, *self.given["command"], *words], stdout=log, **how)
            while child.poll() is None:
                with contextlib.suppress(queue.Empty):
                    child.send_signal(stop := received.get(timeout=0.1))
            self.settle({""}, is_over=not stop)
        ended, failed = (len(self.found(state)) for state in (State.COMPLETE, State.FAIL))
        print(f"trials: {ended} finished, {failed} failed, {self.left} left; {self.directory}")
        if ended:
            best = self.study.best_trial
            print(f"best: trial-{best.number}, {self.given['metric']} {best.value:.6g}:")
            print(shlex.join(options(best.params)))
        return 128 + stop if stop else int(not ended)


def main() -> None:
    """Run the command."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and its child
    try:
        match sys.argv[1:]:
            case ["-h" | "--help"]:
                print(__doc__)
            case [file]:
                sys.exit(Sweep(Path(file), alone=True).train())
            case [file, "left", *words]:
                sweep = Sweep(Path(file), alone=True, words=words)
                print(sweep.left, *sweep.given["command"], sep="\n")
            case [file, "ask", job, *words]:
                sweep = Sweep(Path(file), alone=False, words=words)
                sweep.settle({job}, is_over=False)  # it may have been requeued
                if sweep.left:
                    print(*sweep.ask(job)[1], sep="\n")
            case [file, "tell", job]:
                Sweep(Path(file), alone=False).settle({job}, is_over=True)
            case _:
                sys.exit(__doc__)
    except errors.UserError as error:
        sys.exit(failures.describe(error))


if __name__ == "__main__":
    main()
