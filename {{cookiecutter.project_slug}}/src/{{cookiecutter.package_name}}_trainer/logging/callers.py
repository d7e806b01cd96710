"""How loggers are called: at once, or in a thread, so that one that hangs does not end training."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from .base import Logger

T = TypeVar("T")
_Call = Callable[[Logger], object]
LIMIT = 120.0
"""Seconds after which a call has hung."""
_MOST = 1000
"""Calls that wait for their turn, before training waits for the logger."""


class LoggerHangs(Exception):
    """A method of a logger has not returned."""


class Caller(Protocol):
    """Calls the methods of one logger, in order."""

    def do(self, call: Callable[[Logger], T]) -> T:
        """Call a method, and wait for what it returns."""
        ...

    def send(self, call: _Call) -> None:
        """Call a method some time; what it raises is raised by a later call."""
        ...

    def end(self) -> None:
        """Call no more methods."""
        ...


def caller_of(logger: Logger) -> Caller:
    """Return what calls a logger."""
    return InThread(logger) if logger.in_thread else AtOnce(logger)


class AtOnce(Caller):
    """Calls a logger in the thread of training."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def do(self, call: Callable[[Logger], T]) -> T:
        return call(self._logger)

    def send(self, call: _Call) -> None:
        call(self._logger)

    def end(self) -> None:
        """Nothing is pending."""


class InThread(Caller):
    """Calls a logger in a thread of its own. No call waits for a method that hangs.

    Raises:
        LoggerHangs: From each method, if a call to the logger has not returned for ``LIMIT`` s.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._calls: queue.Queue[_Call | None] = queue.Queue(_MOST)
        self._began: float | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        name = f"logger {logger.name}"
        # A daemon: a method that hangs keeps no process from its end.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, call: Callable[[Logger], T]) -> T:
        result: Future[T] = Future()
        self._put(lambda logger: result.set_result(call(logger)))
        while True:
            try:
                return result.result(timeout=0.1)
            except TimeoutError:
                self._check()

    def send(self, call: _Call) -> None:
        self._put(call)

    def end(self) -> None:
        self._has_ended = True
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def _put(self, call: _Call) -> None:
        while True:
            self._check()
            try:
                return self._calls.put(call, timeout=1)
            except queue.Full:
                continue

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if (began := self._began) is not None and time.monotonic() - began > LIMIT:
            raise LoggerHangs(f"a call has not returned for {LIMIT:g} s")

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._has_ended:
            self._began = time.monotonic()
            try:
                call(self._logger)
            except BaseException as error:  # raised in the thread of training
                self._error = error
                return
            self._began = None
