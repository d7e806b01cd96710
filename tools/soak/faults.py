"""What strikes a run: one generator for each fault; see the package's docstring for how to add one.

What happens to an attempt then: it ``fails``; it ``saves`` and ends; it ``continues`` to its end;
or ``any`` of these.
"""

import math
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from .machine import Need
from .ways import EVERY, Attempt, Way

Ends = Literal["fails", "saves", "continues", "any"]
Strike = Generator[None, None, None]
# Seconds: of the strategy's timeout where a rank hangs, which then ends five seconds later.
SOON = 8.0


@dataclass(frozen=True)
class Fault:
    """A fault and what may come of it.

    Args:
        name: in the journal and the table.
        strike: the generator.
        ends: what happens to the attempt.
        fits: ways that it can strike.
        lost: most steps that may be lost.
        needs: why it cannot strike here.
        says: what the attempt's output must have, if it failed.
        is_before: whether it strikes before the attempt starts.
        ends_log: whether the log of metrics ends with it, though training continues.
    """

    name: str
    strike: Callable[[Attempt], Strike]
    ends: Ends
    fits: Callable[[Way], bool]
    lost: float
    needs: Need
    says: str
    is_before: bool
    ends_log: bool


FAULTS: dict[str, Fault] = {}


def has_peers(way: Way) -> bool:
    return way.processes > 1


def fault(
    name: str,
    ends: Ends = "fails",
    fits: Callable[[Way], bool] = lambda _: True,
    *,
    lost: float = EVERY,
    needs: Need = str,
    says: str = "",
    is_before: bool = False,
    ends_log: bool = False,
) -> Callable[[Callable[[Attempt], Strike]], Callable[[Attempt], Strike]]:
    """Register a generator as a fault."""

    def register(strike: Callable[[Attempt], Strike]) -> Callable[[Attempt], Strike]:
        rest = (lost, needs, says, is_before, ends_log)
        FAULTS[name] = Fault(name, strike, ends, fits, *rest)
        return strike

    return register


# --- signals -------------------------------------------------------------------------------------


def _signal_to_rank(number: signal.Signals, ends: Ends) -> None:
    @fault(f"SIG{number.name[3:]} to a rank", ends)
    def strike(attempt: Attempt) -> Strike:
        yield
        os.kill(attempt.a_rank(), number)


def _signal_to_launcher(number: signal.Signals, name: str) -> None:
    is_kill = number == signal.SIGKILL

    @fault(
        f"SIG{number.name[3:]} to {name}",
        "fails" if is_kill else "saves",
        lambda way: has_peers(way) and way.launcher == name.split()[-1],
    )
    def strike(attempt: Attempt) -> Strike:
        attempt.fresh = is_kill
        yield
        os.kill(attempt.a_launcher(), number)


def _pause(process: int, seconds: float) -> None:
    os.kill(process, signal.SIGSTOP)
    threading.Timer(seconds, _continue, [process]).start()


def _continue(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


_signal_to_rank(signal.SIGKILL, "fails")
for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    _signal_to_rank(_number, "saves")
for _number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    for _name in ("the launcher", "an agent"):
        _signal_to_launcher(_number, _name)


@fault("a rank stopped for a moment", "continues")
def pause_rank(attempt: Attempt) -> Strike:
    yield
    _pause(attempt.a_rank(), attempt.dice.uniform(0.2, 1.5))


@fault("SIGSTOP to a rank", fits=has_peers)
def stop_rank(attempt: Attempt) -> Strike:
    attempt.timeout = SOON
    yield
    os.kill(attempt.a_rank(), signal.SIGSTOP)


@fault(
    "the launcher stopped", "continues", lambda way: has_peers(way) and way.launcher == "launcher"
)
def stop_launcher(attempt: Attempt) -> Strike:
    yield
    _pause(attempt.a_launcher(), attempt.dice.uniform(1, 5))


@fault("an agent stopped", "continues", lambda way: way.launcher == "agent")
def stop_agent(attempt: Attempt) -> Strike:
    """Longer than until its peers take it for lost, where it has any."""
    yield
    _pause(attempt.a_launcher(), attempt.dice.uniform(1, 12))


# --- within a rank -------------------------------------------------------------------------------


def _order(name: str, what: str, fits: Callable[[Way], bool], seconds: float | None) -> None:
    @fault(name, fits=fits)
    def strike(attempt: Attempt) -> Strike:
        attempt.timeout = seconds or attempt.timeout
        yield
        attempt.order(what)


_order("segmentation fault", "segfaults", lambda _: True, None)
_order("abort", "abort", lambda _: True, None)
_order("os._exit(0)", "leaves", lambda _: True, None)
_order("a rank that sleeps", "sleeps", has_peers, SOON)
_order("a GIL that is held", "holds_the_interpreter", has_peers, SOON)


@fault("a loader worker killed")
def kill_worker(attempt: Attempt) -> Strike:
    attempt.options += ["--model.workers", "1"]
    yield
    for rank in attempt.ranks():
        for child in psutil.Process(rank).children():
            child.kill()
            return


# --- checkpoints before a start -------------------------------------------------------------------


@fault("a bit of the newest checkpoint inverted", "continues", lost=2 * EVERY + 1, is_before=True)
def flip_bit(attempt: Attempt) -> Strike:
    checkpoints = attempt.checkpoints()
    if len(checkpoints) < 2:
        return
    file = attempt.dice.choice(sorted(checkpoints[-1].iterdir()))
    data = bytearray(file.read_bytes())
    data[attempt.dice.randrange(len(data))] ^= 1 << attempt.dice.randrange(8)
    file.write_bytes(data)
    yield


@fault("the newest checkpoint cut short", "continues", lost=2 * EVERY + 1, is_before=True)
def truncate(attempt: Attempt) -> Strike:
    checkpoints = attempt.checkpoints()
    if len(checkpoints) < 2:
        return
    file = attempt.dice.choice(sorted(checkpoints[-1].iterdir()))
    os.truncate(file, attempt.dice.randrange(file.stat().st_size))
    yield


@fault("an older checkpoint resumed", "continues", lost=math.inf, is_before=True)
def resume_older(attempt: Attempt) -> Strike:
    checkpoints = attempt.checkpoints()
    if len(checkpoints) < 2:
        return
    attempt.resume = str(checkpoints[-2])
    yield
