"""A journey: a run that is started until it has finished, with a fault in each attempt."""

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from my_project_trainer.checkpoint import reading as checkpoint

from .faults import Fault, Strike
from .journal import Entry, Failed, Late, Outcome
from .ways import EVERY, LAST, TIMEOUT, Attempt, Way

# Seconds within which an attempt ends or makes a step, on however busy a machine.
PATIENCE = 600.0
# And within which its last process ends after that of its launchers.
SECONDS_TO_END = 60.0
_POLL_SECONDS = 0.05
# Of a strike: the process has just ended by itself.
_ENDED = (ProcessLookupError, psutil.NoSuchProcess, IndexError)
# Attempts that may end by a timeout of a few seconds before a fault that needs it has struck.
_MOST_EARLY = 3


@dataclass
class Journey:
    """A run with its faults.

    Args:
        way: how it is started.
        folder: of its own, the working directory of all its attempts.
        logs: folder that gets the output of its attempts.
        dice: random numbers.
        faults: those that it may have, in order of preference.
        most: how many of them.
        hurries: whether it is to have no more faults.
        deadline: time, as time.monotonic's, at which it is given up.
        entry: makes the journal's entry of a fault by its name and step.
    """

    way: Way
    folder: Path
    logs: Path
    dice: random.Random
    faults: list[Fault]
    most: int
    hurries: Callable[[], bool]
    deadline: float
    entry: Callable[[str, int], Entry]
    entries: list[Entry] = field(default_factory=list)
    attempts: int = 0
    reached: int = 0
    # What the next attempt may lose, in steps, and what is to blame for it.
    bound: float = EVERY
    blamed: Entry | None = None
    early: int = 0
    has_whole_log: bool = True
    # Seconds from faults to the next new steps.
    waited: float = 0.0
    _since: float = 0.0
    # Faults, when they struck, and the step after which the next one is new.
    _waiting: list[tuple[Entry, float, int]] = field(default_factory=list)
    _last: tuple[Entry, float, int] | None = None
    _struck: list[Strike] = field(default_factory=list)

    def travel(self) -> None:
        """Run to the end, through faults as long as there are steps enough."""
        while not self.attempt():
            pass

    def _plan(self, attempt: Attempt, plan: list[tuple[Fault, Strike]]) -> None:
        """Prepare faults: the last one ends the attempt, if its launcher does not restart it."""
        if self.hurries() or self.reached >= LAST - 16:
            return
        not_now = []
        while self.faults and len(self.entries) + len(plan) < self.most:
            fault = self._next(goes_on=not plan)
            strike = fault.strike(attempt)
            if next(strike, self) is not None:
                not_now.append(fault)
                continue
            plan.append((fault, strike))
            goes_on = fault.ends == "continues" or (self.way.restarts and len(plan) < 4)
            if not goes_on or fault.ends_log:
                break
        self.faults += not_now

    def _next(self, goes_on: bool) -> Fault:
        """The next fault that a run survives, or that ends it; if there is none, any."""
        is_late = self.reached > LAST - 30  # then no step is seen after one with which the log ends
        fitting = [i for i, fault in enumerate(self.faults) if is_late or not fault.ends_log]
        wanted = (i for i in fitting if (self.faults[i].ends == "continues") == goes_on)
        return self.faults.pop(next(wanted, next(iter(fitting), 0)))

    def attempt(self) -> bool:
        """Start once, with faults; whether the run has finished."""
        log = self.logs / f"attempt-{self.attempts:02}.log"
        self.attempts += 1
        self._struck = []
        attempt = Attempt(self.way, self.folder, log, self.dice)
        strikes: list[tuple[Fault, Strike]] = []
        try:
            self._plan(attempt, strikes)
            has_finished = self._run(attempt, strikes)
            self.way.stop(attempt)
            for strike in self._struck:  # now those that look at what is left do
                next(strike, None)
            return has_finished
        finally:
            self.way.stop(attempt)
            for _, strike in strikes:
                strike.close()

    def _run(self, attempt: Attempt, strikes: list[tuple[Fault, Strike]]) -> bool:
        for path in [*self.folder.glob("process-of-rank-*"), *self.folder.glob("order*")]:
            path.unlink()
        (self.folder / "outcome").unlink(missing_ok=True)
        struck: Fault | None = None
        for fault, _ in strikes:
            if fault.is_before:
                self.blamed = self._note(fault, self.reached)
                self.bound = max(self.bound, fault.lost)
                struck = None if fault.ends == "continues" else fault
        self.way.begin(attempt)
        target = self.reached
        for fault, strike in strikes:
            if not fault.is_before:
                target += self.dice.randint(1, 8 if struck is None else 4)
                if not self._reach(attempt, target):
                    break
                struck = fault if self._strike(attempt, fault, strike) else struck
                target = max(target, attempt.steps())
        self._wait(attempt)
        if struck is not None and self._last is not None:
            self.entries[-1].ended = round(time.monotonic() - self._last[1], 2)
        self._expect_next_attempt(attempt, struck)
        self._check_left(attempt)
        printed = attempt.printed()
        allowed = 0.0 if struck is None else max(struck.lost, attempt.may_lose)
        if "run directory" in printed:  # otherwise it ended before it resumed
            self._check_lost(printed, struck, allowed)
            self.bound, self.blamed = EVERY, None
        self.reached = attempt.steps()
        if struck is not None:
            self.bound, self.blamed = max(self.bound, allowed), self.entries[-1]
        return self._check_end(attempt, struck, printed)

    def _note(self, fault: Fault, step: int) -> Entry:
        entry = self.entry(fault.name, step)
        self.entries.append(entry)
        # Ranks that restart may first end the step that they are in.
        new = step + (self.way.restarts and fault.ends != "continues")
        self._last = entry, time.monotonic(), new
        self._wait_for(*self._last)
        return entry

    def _wait_for(self, entry: Entry, when: float, step: int) -> None:
        """Measure the time until a step after this one."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append((entry, when, step))

    def _strike(self, attempt: Attempt, fault: Fault, strike: Strike) -> bool:
        self._note(fault, attempt.steps())
        try:
            next(strike, None)
        except _ENDED:
            self.entries.pop()
            self._waiting.pop()
            return False
        self._struck.append(strike)
        return True

    def _look(self, attempt: Attempt) -> int:
        """The newest step; the first new one after a fault is noted with its time."""
        step = attempt.steps()
        for waiting in list(self._waiting):
            entry, struck, new = waiting
            if step > new:
                entry.seconds = round(time.monotonic() - struck, 2)
                self._waiting.remove(waiting)
                if not self._waiting:
                    self.waited += time.monotonic() - self._since
        return step

    def _expect_next_attempt(self, attempt: Attempt, struck: Fault | None) -> None:
        """After a fault that ended an attempt, only a step of the next one is new."""
        if struck is None or struck.is_before or self.way.restarts or self._last is None:
            return
        if not attempt.ended().startswith("finished"):
            entry, when, _ = self._last
            self._waiting = [waiting for waiting in self._waiting if waiting[0] is not entry]
            entry.seconds = None
            self._wait_for(entry, when, attempt.steps())

    def _reach(self, attempt: Attempt, target: int) -> bool:
        """Wait until a run has made a step, and a moment more; False if it ends before."""
        deadline = time.monotonic() + PATIENCE
        while self._look(attempt) < target or not attempt.ranks():
            if attempt.code() is not None:
                return False
            if time.monotonic() > deadline:
                raise Failed("hung", f"step {target} was not made in {PATIENCE:g} s")
            _sleep(self.deadline)
        time.sleep(self.dice.uniform(0, 0.1))
        return attempt.code() is None

    def _wait(self, attempt: Attempt) -> None:
        deadline = time.monotonic() + PATIENCE
        while attempt.code() is None:
            self._look(attempt)
            if time.monotonic() > deadline:
                left = ", ".join(self.way.left(attempt))
                raise Failed("hung", f"it has not ended in {PATIENCE:g} s: {left}")
            _sleep(self.deadline)
        self._look(attempt)

    # --- checks ----------------------------------------------------------------------------------

    def _check_left(self, attempt: Attempt) -> None:
        deadline = time.monotonic() + SECONDS_TO_END
        while left := self.way.left(attempt):
            if time.monotonic() > deadline:
                raise Failed("leftover", f"processes are left: {', '.join(left)}")
            time.sleep(0.1)

    def _check_lost(self, printed: str, struck: Fault | None, allowed: float) -> None:
        """No more is lost than lies between two checkpoints; ``allowed``: of this attempt."""
        resumed = [int(step) for step in re.findall(r"resumed from \S*step-(\d+)\b", printed)]
        lost = max(0, self.reached - (resumed[0] if resumed else 0))
        if self.blamed is not None:
            self.blamed.lost = lost
        if lost > self.bound:
            raise Failed("lost", f"{lost} steps were lost, more than {self.bound}")
        if struck is None:
            return
        is_requeued = printed.count("run directory: ") > 1 and struck.ends != "continues"
        if not (self.way.restarts or is_requeued):
            return
        # Restarts within the attempt, of which the log says when, but not which fault each follows.
        last = self.entries[-1]
        again = resumed[1:] if self.way.restarts else resumed or [0]
        last.lost = max([0, *(last.step - step for step in again[-1:])])
        if last.lost > allowed:
            raise Failed("lost", f"{last.lost} steps were lost, more than {allowed}")

    def _check_end(self, attempt: Attempt, struck: Fault | None, printed: str) -> bool:
        """An attempt ended as its fault has it; where that came too late, as it ends by itself."""
        code, ended = attempt.code(), attempt.ended()
        how = f"exit code {code}, {ended or 'no outcome'}: {printed[-3000:]}"
        if struck is not None and struck.ends_log:
            self.has_whole_log = False
        if ended == f"finished step {LAST}" and (self.reached == LAST or not self.has_whole_log):
            if code and struck is None:
                raise Failed("lost", f"it finished, but {how}")
            return True
        if struck is None or (struck.ends == "continues" and not self.way.restarts):
            self.early += 1
            if attempt.timeout == TIMEOUT or self.early > _MOST_EARLY:
                raise Failed("lost", f"it did not continue, {how}")
            return False
        self.early = 0
        if struck.ends == "saves" and self.way.saves and not ended.startswith("preempted"):
            raise Failed("lost", f"it did not save, {how}")
        is_watched = self.way.processes > 1 and not self.way.restarts
        if struck.ends == "fails" and code == 0 and is_watched:
            raise Failed("lost", f"it failed, but {how}")
        if struck.says and struck.says not in printed:
            raise Failed("lost", f"it did not say {struck.says!r}, {how}")
        return False


def compare(journey: Journey, reference: Path) -> Outcome:
    """Compare a journey's run with an undisturbed one."""
    run = journey.folder / "run"
    records = [json.loads((folder / "run.json").read_text()) for folder in (run, reference)]
    attempts = [attempt for record in records for attempt in record["attempts"]]
    is_same_layout = len({attempt["layout"]["world_size"] for attempt in attempts}) == 1
    states = [
        checkpoint.Checkpoint(checkpoint.resolve(folder)).state()["model"]
        for folder in (run, reference)
    ]
    if states[0].keys() != states[1].keys():
        raise Failed("differs", "the names of weights differ from those of the undisturbed run")
    ours, theirs = ((path / "metrics.csv").read_text().splitlines() for path in (run, reference))
    if not is_same_layout:
        ours, theirs = ([row.split(",")[0] for row in rows] for rows in (ours, theirs))
    if ours != theirs if journey.has_whole_log else set(ours) - set(theirs):
        raise Failed("differs", "the metrics differ from those of the undisturbed run")
    if not is_same_layout:
        return "finished"
    if not all(value.equal(states[1][name]) for name, value in states[0].items()):
        raise Failed("differs", "the weights differ from those of the undisturbed run")
    return "equal"


def _sleep(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise Late
    time.sleep(_POLL_SECONDS)


def undisturbed(way: Way, folder: Path, log: Path, deadline: float) -> Path:
    """A run that nothing befalls."""
    attempt = Attempt(way, folder, log, random.Random(0))
    started = time.monotonic()
    try:
        way.begin(attempt)
        while attempt.code() is None:
            if time.monotonic() > started + PATIENCE:
                raise Failed("hung", "the undisturbed run has not ended")
            _sleep(deadline)
    finally:
        way.stop(attempt)
    if attempt.ended() != f"finished step {LAST}":
        raise Failed("lost", f"the undisturbed run failed: {attempt.printed()[-3000:]}")
    return folder / "run"
