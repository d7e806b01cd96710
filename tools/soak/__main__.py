"""Strikes runs for hours, or for the minutes of CI: see the package's docstring.

``python -m soak [--seconds N] [--faults N] [--seed S] [--only WAY …] [--workers N] [--slice]``
"""

import argparse
import math
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.matrix import ENGINES

from tests import fork_server

from . import cluster, machine, network, table
from .faults import Fault
from .journal import Entry, Failed, Journal, Late, Outcome
from .journal import Journey as Line
from .journeys import Journey, compare, undisturbed
from .storage_faults import FAULTS
from .ways import WAYS, Way

_ON_NODES = (network.WAYS, cluster.WAYS)
WAYS |= network.WAYS | cluster.WAYS

FAULTS_OF_A_RUN = 12
# A slice has no fault later than this, gives runs up at another time, and ends within seven minutes
# on however busy a machine. It must have had so many faults in runs that have finished.
SLICE_SECONDS, SLICE_MOST_SECONDS = 240.0, 380.0
SLICE_FAULTS, SLICE_FAULTS_OF_A_RUN = 5, 5


@dataclass
class Soak:
    """Takes the ways in turn, several journeys side by side.

    Args:
        seed: of all random numbers.
        ways: by name.
        faults: by name.
        journal: gets the results.
        folder: for the runs.
        kept: folder for what failed.
        seconds, most: when and after how many faults no journey begins any more; both must be past.
        is_slice: whether it must end soon after these seconds.
    """

    seed: int
    ways: dict[str, Way]
    faults: dict[str, Fault]
    journal: Journal
    folder: Path
    kept: Path
    seconds: float
    most: int
    is_slice: bool
    started: float = field(default_factory=time.monotonic)
    new_faults: int = 0
    failed: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begun: dict[str, int] = field(default_factory=dict)
    _undisturbed: dict[str, Path] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def work(self) -> None:
        """Travel until it is time to end; one worker."""
        while (chosen := self._choose()) is not None:
            try:
                self._travel(*chosen)
            except Late:
                print(f"{chosen[0]} {chosen[1]}: not finished in time", flush=True)
            except Failed as failed:
                print(f"{chosen[0]}: {failed}; it is left out", flush=True)
                self._leave_out(chosen[0])
            except Exception:  # of the soak itself: the other ways go on
                traceback.print_exc()
                self._leave_out(chosen[0])

    @property
    def deadline(self) -> float:
        return self.started + SLICE_MOST_SECONDS if self.is_slice else math.inf

    def _leave_out(self, name: str) -> None:
        with self._lock:
            self.failed.append(name)
            self.ways.pop(name, None)

    def end(self, *_: object) -> None:
        """Let runs end without further faults; a handler of signals."""
        self.seconds, self.most, self.is_slice = 0.0, 0, True
        self.started = time.monotonic()

    def _is_late(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    def _choose(self) -> tuple[str, int] | None:
        """The way with the fewest journeys, and the number of its next one."""
        with self._lock:
            if (self._is_late() and self.new_faults >= self.most) or not self.ways:
                return None
            names = sorted(self.ways)
            random.Random(self.seed).shuffle(names)
            # Even a slice has one of each of these.
            first = [next(filter(node.__contains__, names), "") for node in _ON_NODES]
            names.sort(key=lambda name: name not in first)
            for name in names:
                self._begun.setdefault(name, self.journal.journeys_of(name))
                self._locks.setdefault(name, threading.Lock())
            name = min(names, key=self._begun.__getitem__)
            self._begun[name] += 1
            return name, self._begun[name] - 1

    def _reference(self, name: str) -> Path:
        with self._locks[name]:
            if name not in self._undisturbed:
                folder = self.folder / f"{name} undisturbed".replace(" ", "-")
                folder.mkdir()
                log = folder.with_name(f"{folder.name}.log")
                way = self.ways[name]
                self._undisturbed[name] = undisturbed(way, folder, log, self.deadline)
            return self._undisturbed[name]

    def _deck(self, name: str, dice: random.Random) -> list[Fault]:
        """Faults that can strike a way: those that have struck it least come first."""
        struck = self.journal.faults_of(name)
        fitting = [fault for fault in self.faults.values() if fault.fits(self.ways[name])]
        dice.shuffle(fitting)
        return sorted(fitting, key=lambda each: struck[each.name])

    def _travel(self, name: str, number: int) -> None:
        way, dice = self.ways[name], random.Random(f"{self.seed} {name} {number}")
        reference = self._reference(name)
        folder = self.folder / f"{name} {number}".replace(" ", "-")
        logs = folder.with_name(f"{folder.name}-logs")
        logs.mkdir()
        journey = Journey(
            *(way, folder, logs, dice, self._deck(name, dice)),
            most=SLICE_FAULTS_OF_A_RUN if self.is_slice else FAULTS_OF_A_RUN,
            hurries=lambda: self.is_slice and self._is_late(),
            deadline=self.deadline,
            entry=lambda fault, step: Entry(self.seed, number, name, fault, step),
        )
        with machine.disk(folder, way.has_own_disk):
            began = time.monotonic()
            outcome = self._outcome(journey, reference)
            seconds = round(time.monotonic() - began, 1)
        line = Line(self.seed, number, name, seconds, outcome, round(journey.waited, 1))
        self.journal.add(line, journey.entries)
        with self._lock:
            self.new_faults += len(journey.entries)
        faults = "; ".join(entry.fault for entry in journey.entries) or "no fault"
        print(f"{name} {number}: {faults}: {outcome}, {seconds:.0f} s", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(logs, ignore_errors=True)

    def _outcome(self, journey: Journey, reference: Path) -> Outcome:
        """Make a journey and compare; of one that failed, keep what is left."""
        try:
            journey.travel()
            outcome = compare(journey, reference)
        except Failed as failed:
            place = self.kept / journey.folder.name
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(journey.folder, place, symlinks=True)
            shutil.copytree(journey.logs, place / "logs")
            print(f"{failed.outcome}: {failed}\n  left in {place}", flush=True)
            if journey.entries:
                last = journey.entries[-1]
                last.outcome, last.error = failed.outcome, str(failed)[:400]
            return failed.outcome
        for entry in journey.entries:
            entry.outcome = outcome
        return outcome


def available(only: Sequence[str]) -> dict[str, Way]:
    """The ways whose packages and programs are here; in CI, one that is missing is an error."""
    ways = {name: WAYS[name] for name in only or WAYS}
    for name, way in list(ways.items()):
        if reason := way.missing():
            if os.environ.get("CI"):
                raise SystemExit(f"{name}: {reason}")
            print(f"left out: {name}: {reason}")
            del ways[name]
    return ways


@contextmanager
def _serving(folder: Path) -> Iterator[None]:
    """Fork servers that have loaded the library of faults, where it can be compiled."""
    with ExitStack() as stack:
        if not machine.compiler():
            os.environ["LD_PRELOAD"] = str(machine.library(folder))
        try:
            stack.enter_context(fork_server.serving(ENGINES))
        finally:
            os.environ.pop("LD_PRELOAD", None)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no run after that")
    parser.add_argument("--faults", type=int, default=0, help="and not before so many more faults")
    parser.add_argument("--seed", type=int, help="default: the journal's, or a random one")
    parser.add_argument("--only", nargs="+", default=[], choices=list(WAYS), metavar="WAY")
    parser.add_argument("--fault", nargs="+", default=[], choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--workers", type=int, default=3, help="journeys side by side")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    parser.add_argument("--slice", action="store_true", help="a few minutes, in a journal apart")
    parser.add_argument("--page", type=Path, help="only write the journal's tables into this page")
    options = parser.parse_args(arguments)
    path = options.folder / ("slice.jsonl" if options.slice else "journal.jsonl")
    if options.slice:
        path.unlink(missing_ok=True)
        options.seconds = SLICE_SECONDS
    journal = Journal(path)
    if options.page is not None:
        table.write(journal, options.page)
        return 0
    known = [journey.seed for journey in journal.journeys]
    seed = known[-1] if known and options.seed is None else options.seed
    seed = secrets.randbits(32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    faults = {name: FAULTS[name] for name in options.fault or FAULTS}
    for name, fault in list(faults.items()):
        if reason := fault.needs():
            print(f"left out: {name}: {reason}")
            del faults[name]
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(
        *(seed, available(options.only), faults, journal, folder, options.folder / "kept"),
        *(options.seconds, options.faults, options.slice),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, soak.end)
    machine.mounts()  # before any thread
    with _serving(folder), ThreadPoolExecutor(options.workers) as executor:
        for worker in [executor.submit(soak.work) for _ in range(options.workers)]:
            worker.result()
    shutil.rmtree(folder, ignore_errors=True)
    print(journal.summary())
    if options.slice and soak.new_faults < SLICE_FAULTS:
        print(f"a slice has at least {SLICE_FAULTS} faults")
        return 1
    return 1 if journal.bad() or soak.failed else 0


if __name__ == "__main__":
    sys.exit(main())
