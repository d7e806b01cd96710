"""Trains under every strategy while faults befall it, and compares with runs that none befell.

``python -m chaos [--seconds 300] [--seed N] [--faults 60] [--only STRATEGY …]``

A journey is a run that is started again, with ``resume auto``, until it has finished. On its way
ranks and launchers are killed, stopped for a while, told to end, denied the disk; and between two
attempts a bit of the newest checkpoint is flipped, or an older one is resumed. After each attempt
no process may be left, and no more may be lost than lies between two checkpoints. In the end
metrics and checkpoint must equal, to the last bit, those of the run that nothing has disturbed.
"""

import argparse
import contextlib
import os
import random
import re
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from my_project_trainer.checkpoint import reading as checkpoint
from tests.conformance.horovod_rows import horovodrun
from tests.conformance.matrix import ENGINES
from tests.project import PACKAGE, missing, start

from processes import assert_nothing_left, at_root
from tests import fork_server

EVERY = 5
EPOCHS = 4
LAST = 40  # steps: 80 samples an epoch, 8 a step
FAULTS = 4  # of a journey
PATIENCE = 120.0  # seconds; a run takes about five
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@dataclass(frozen=True)
class Way:
    """How a strategy is started on two devices.

    Args:
        strategy: its name.
        engine: that must be installed.
        launch: arguments of Python before those of the package.
        by: what starts Python.
        devices: ``--trainer.devices``; 1 where something else starts the ranks.
        is_ours: whether a launcher of ours ends the ranks when it is killed itself.
    """

    strategy: str
    engine: str = "torch"
    launch: tuple[str, ...] = ()
    by: Callable[[], list[str]] = list
    devices: int = 2
    is_ours: bool = True


WAYS = {
    "single_device": Way("single_device", devices=1),
    "dp": Way("dp"),
    "ddp": Way("ddp"),
    "ddp_spawn": Way("ddp_spawn"),
    "ddp_fork": Way("ddp_fork"),
    "ddp by torchrun": Way("ddp", launch=tuple(TORCHRUN), is_ours=False),
    "ddp_zero1": Way("ddp_zero1"),
    "fsdp": Way("fsdp"),
    "hsdp": Way("hsdp"),
    "ddp_sharded": Way("ddp_sharded", engine="fairscale"),
    "fairscale_fsdp": Way("fairscale_fsdp", engine="fairscale"),
    "deepspeed_stage_1": Way("deepspeed_stage_1", engine="deepspeed"),
    "deepspeed_stage_2": Way("deepspeed_stage_2", engine="deepspeed"),
    "deepspeed_stage_3": Way("deepspeed_stage_3", engine="deepspeed"),
    "horovod": Way("horovod", engine="horovod", by=lambda: horovodrun(2), devices=1, is_ours=False),
}


@dataclass
class Journey:
    """A run with its faults, in a folder of its own."""

    name: str
    way: Way
    folder: Path
    dice: random.Random
    faults: list[str] = field(default_factory=list)
    resume: str = "auto"
    # What the next attempt may have lost, in steps; None: it resumes from wherever it was told.
    bound: int | None = EVERY
    reached: int = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def steps(self) -> int:
        """The newest step in the log."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            *_, last = (self.run / "metrics.csv").read_text().rstrip("\n").split("\n")
            return int(last.split(",")[0])
        return 0

    def ranks(self) -> list[int]:
        """Processes of the ranks."""
        return [int(path.read_text()) for path in sorted(self.folder.glob("process-of-rank-*"))]

    def checkpoints(self) -> list[Path]:
        found: list[Path] = checkpoint.complete(self.run / "checkpoints")
        return found


def command(way: Way, folder: Path, resume: str) -> list[str | Path]:
    return [
        *(*way.launch, "-m", PACKAGE, "fit", "--model", "chaos_subject.Model"),
        *("--trainer.strategy", way.strategy, "--trainer.devices", str(way.devices)),
        *("--trainer.accelerator", "cpu", "--trainer.max_epochs", str(EPOCHS)),
        *("--trainer.global_batch_size", "8", "--trainer.log_every_n_steps", "1"),
        *("--trainer.checkpoint_every_n_steps", str(EVERY), "--trainer.loggers", "[csv]"),
        *("--trainer.default_root_dir", folder, "--trainer.run_name", "run"),
        *("--trainer.resume", resume),
    ]


def begin(way: Way, folder: Path, resume: str) -> Any:
    for path in folder.glob("process-of-rank-*"):
        path.unlink()
    arguments = command(way, folder, resume)
    extra = at_root() | {"TRAINER_SAVE_SECONDS": "20"}
    engine = way.engine if way.engine in ("deepspeed", "fairscale") else "torch"
    return start(arguments, cwd=folder, extra=extra, by=way.by(), engine=engine)


# --- faults during an attempt --------------------------------------------------------------------


def kill_rank(journey: Journey, process: Any) -> None:
    os.kill(journey.dice.choice(journey.ranks()), signal.SIGKILL)


def kill_launcher(journey: Journey, process: Any) -> None:
    process.kill()


def stop_rank(journey: Journey, process: Any) -> None:
    rank = journey.dice.choice(journey.ranks())
    os.kill(rank, signal.SIGSTOP)
    time.sleep(journey.dice.uniform(0.2, 1.5))
    os.kill(rank, signal.SIGCONT)


def terminate(journey: Journey, process: Any) -> None:
    _tell(journey, process, signal.SIGTERM)


def preempt(journey: Journey, process: Any) -> None:
    _tell(journey, process, signal.SIGUSR1)


def _tell(journey: Journey, process: Any, number: int) -> None:
    """Send a signal to a launcher of ours, and to a rank where another one might die of it."""
    if journey.way.is_ours:
        process.send_signal(number)
    else:
        os.kill(journey.dice.choice(journey.ranks()), number)


def fill_disk(journey: Journey, process: Any) -> None:
    """As where a disk is full, the kernel refuses what makes a file of weights."""
    for rank in journey.ranks():
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (30_000, 30_000))


# --- faults between two attempts -----------------------------------------------------------------


def flip_bit(journey: Journey) -> bool:
    """Damage the newest checkpoint, where there is one before."""
    found = journey.checkpoints()
    if len(found) < 2:
        return False
    file = journey.dice.choice(sorted(found[-1].iterdir()))
    data = bytearray(file.read_bytes())
    data[journey.dice.randrange(len(data))] ^= 1 << journey.dice.randrange(8)
    file.write_bytes(data)
    journey.bound = None if journey.bound is None else 2 * EVERY + 1
    return True


def resume_older(journey: Journey) -> bool:
    found = journey.checkpoints()
    if len(found) < 2:
        return False
    journey.resume = str(found[-2])
    journey.bound = None
    return True


ENDING = [kill_rank, kill_launcher, terminate, preempt, fill_disk]
BETWEEN = [flip_bit, resume_older]


# --- journeys ----------------------------------------------------------------------------------


def undisturbed(way: Way, folder: Path) -> Path:
    """A run that nothing befalls."""
    process = begin(way, folder, "auto")
    output, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, f"undisturbed: {output}\n{error}"
    return folder / "run"


def travel(journey: Journey, most: int) -> None:
    """Run to the end, through so many faults at least, where there are steps enough."""
    while True:
        faults = _plan(journey) if len(journey.faults) < most else []
        if attempt(journey, faults):
            return
        if len(journey.faults) < most and journey.dice.random() < 0.4:
            between = journey.dice.choice(BETWEEN)
            if between(journey):
                journey.faults.append(between.__name__)


def _plan(journey: Journey) -> list[tuple[int, Any]]:
    """Faults of the next attempt and the steps after which they come; the last one ends it."""
    target = journey.reached + journey.dice.randint(1, 8)
    plan: list[tuple[int, Any]] = []
    if journey.dice.random() < 0.3:
        plan.append((target, stop_rank))
    ending = journey.dice.choice(ENDING)
    if ending is kill_launcher and not journey.way.is_ours:
        ending = kill_rank
    return [*plan, (target + len(plan), ending)] if target < LAST - 6 else []


def attempt(journey: Journey, plan: Sequence[tuple[int, Any]]) -> bool:
    """Start once, with faults after some steps; whether the run has finished."""
    before, bound = journey.reached, journey.bound
    process = begin(journey.way, journey.folder, journey.resume)
    ending, output, error = None, "", ""
    try:
        for target, fault in plan:
            if not _reach(journey, process, target):
                break
            with contextlib.suppress(ProcessLookupError):
                fault(journey, process)
            journey.faults.append(fault.__name__)
            ending = fault
        output, error = process.communicate(timeout=PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert_nothing_left(journey.folder)
    check_lost(f"{output}\n{error}", before, bound)
    journey.resume, journey.bound, journey.reached = "auto", EVERY, journey.steps()
    check_end(journey, ending, process.returncode, f"{output}\n{error}")
    return process.returncode == 0


def _reach(journey: Journey, process: Any, target: int) -> bool:
    """Wait until a run has made a step, and a moment more; False if it ends before."""
    deadline = time.monotonic() + PATIENCE
    while journey.steps() < target or not journey.ranks():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, f"step {target} was not made"
        time.sleep(0.01)
    time.sleep(journey.dice.uniform(0, 0.1))
    return process.poll() is None


def check_end(journey: Journey, ending: Any, code: int, printed: str) -> None:
    """A run has ended as its last fault has it; where that came too late, as it ends by itself."""
    if ending in (None, stop_rank):
        assert code == 0, f"exit code {code}: {printed}"
    elif code and ending in (terminate, preempt):
        assert "saved after step" in printed or journey.reached == LAST, f"{code}: {printed}"
    elif code and ending is fill_disk:
        assert "cannot be saved: File too large" in printed, f"{code}: {printed}"


def check_lost(output: str, before: int, bound: int | None) -> None:
    """No more is lost than lies between two checkpoints."""
    found = re.search(r"resumed from .*step-(\d+)$", output, re.MULTILINE)
    if bound is not None and "run directory" in output:
        resumed = int(found[1]) if found else 0
        assert before - resumed <= bound, f"{before - resumed} steps were lost: {output}"


def compare(journey: Journey, reference: Path) -> None:
    ours, theirs = ((run / "metrics.csv").read_bytes() for run in (journey.run, reference))
    assert ours == theirs, "the metrics differ from those of the undisturbed run"
    states = [
        checkpoint.Checkpoint(checkpoint.resolve(run)).state()["model"]
        for run in (journey.run, reference)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(value.equal(states[1][name]) for name, value in states[0].items()), "weights differ"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no run after that")
    parser.add_argument("--faults", type=int, default=60, help="and not before so many faults")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", nargs="+", choices=list(WAYS))
    options = parser.parse_args(arguments)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    ways = {name: WAYS[name] for name in options.only or WAYS}
    for name, way in list(ways.items()):
        if way.engine != "torch" and (reason := missing(way.engine)):
            if os.environ.get("CI"):
                raise SystemExit(f"{name}: {reason}")
            print(f"left out: {name}: {reason}")
            del ways[name]
    # A short run covers other strategies each time.
    names = sorted(ways)
    random.Random(seed).shuffle(names)
    with fork_server.serving(ENGINES):
        return _travel_all({name: ways[name] for name in names}, options, seed)


def _travel_all(ways: dict[str, Way], options: argparse.Namespace, seed: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    references: dict[str, Path] = {}
    count: Counter[str] = Counter()
    journeys = 0
    started = time.monotonic()
    while True:
        for name, way in ways.items():
            is_over = time.monotonic() - started > options.seconds
            if is_over and count.total() >= options.faults:
                print(_summary(count, journeys, len(references), time.monotonic() - started))
                shutil.rmtree(folder)
                return 0
            if name not in references:
                references[name] = undisturbed(way, _made(folder / f"{name}-undisturbed"))
            number = journeys
            dice = random.Random(f"{seed} {number} {name}")
            journey = Journey(name, way, _made(folder / f"{name}-{number}"), dice)
            try:
                travel(journey, FAULTS)
                compare(journey, references[name])
            except BaseException as error:
                print(f"{name}: after {', '.join(journey.faults)}: {type(error).__name__}: {error}")
                print(f"seed {seed}, journey {number}; left in {journey.folder}", flush=True)
                raise
            journeys += 1
            count.update(journey.faults)
            print(f"{name}: {', '.join(journey.faults) or 'no fault'}: equal", flush=True)
            shutil.rmtree(journey.folder)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _summary(count: Counter[str], journeys: int, ways: int, seconds: float) -> str:
    kinds = ", ".join(f"{name} {number}" for name, number in sorted(count.items()))
    return (
        f"{count.total()} faults in {journeys} runs under {ways} strategies and launchers, "
        f"{seconds:.0f} s: {kinds}; all equal the undisturbed runs"
    )


if __name__ == "__main__":
    sys.exit(main())
