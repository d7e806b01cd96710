"""Runs a function in a process of its own: code of a user may end, corrupt or hang its process."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..errors import UserError, one_line

T = TypeVar("T")


class Failure(UserError):
    """A child gave no result; the line is why."""


class Exhausted(Failure):
    """A child took too long, or was killed, as if there is too little memory."""


class Child(Generic[T]):
    """A function that runs, from now on, in a child process and process group of its own.

    After ``seconds`` the child and its own children are killed. The result is pickled; if ``how``
    is ``"spawn"`` (a new interpreter) and not ``"fork"``, the function too.
    """

    def __init__(self, function: Callable[[], T], seconds: float, how: str = "fork") -> None:
        context: Any = multiprocessing.get_context(how)
        self._results, results = context.Pipe(duplex=False)
        method = multiprocessing.get_start_method(allow_none=True)
        self._process = context.Process(target=_run, args=(function, results, seconds, method))
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._process.start()
        results.close()

    def result(self) -> T:
        """Wait for the result; UserError and SystemExit are raised as the function raised them."""
        try:
            if not self._results.poll(max(0.0, self._deadline - time.monotonic())):
                raise Exhausted(f"it took longer than {self._seconds:g} s")
            result: T | BaseException = self._results.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            kind = Exhausted if end == "SIGKILL" else Failure
            raise kind(f"its process ended with {end}") from None
        finally:
            with contextlib.suppress(OSError):  # it may not have its group yet
                os.killpg(self._process.pid, signal.SIGKILL)  # its own children, too
            self._process.kill()
            self._process.join()
        if isinstance(result, BaseException):
            raise result
        return result


def _run(function: Callable[[], Any], results: Any, seconds: float, method: str | None) -> None:
    os.setpgid(0, 0)
    multiprocessing.set_start_method(method, force=True)  # for loaders: spawn sets "spawn"
    signal.alarm(int(seconds) + 2)  # it ends also if its parent was killed
    try:
        result = function()
    except (UserError, SystemExit) as error:
        result = error
    except BaseException as error:
        result = Failure(f"{type(error).__name__}: {one_line(error)}")
    results.send(result)
    os._exit(0)  # without destructors, which may wait for process groups
