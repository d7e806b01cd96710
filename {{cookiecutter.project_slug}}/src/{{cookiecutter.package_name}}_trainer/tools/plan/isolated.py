"""Runs a function in a child process: fake tensors may end or corrupt the process, or hang."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ...errors import UserError, one_line


class Failure(Exception):
    """A child did not give a result; the message is why."""


class Child:
    """A function that runs in a child process, and in a process group of its own.

    Args:
        function: Its result is pickled.
        seconds: Of time from now; after it, the child and its own children are killed.
    """

    def __init__(self, function: Callable[[], Any], seconds: float) -> None:
        # Forked: torch and the user's modules are imported already, and no thread was started.
        context = multiprocessing.get_context("fork")
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(function, results, seconds))
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._process.start()
        results.close()

    def result(self) -> Any:
        """Wait for the result.

        Raises:
            UserError: The function raised one.
            Failure: It raised another error, ended its process, or took too long.
        """
        try:
            if not self._results.poll(max(0.0, self._deadline - time.monotonic())):
                raise Failure(f"not done after {self._seconds:g} s")
            kind, value = self._results.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise Failure(f"its process ended with {name}") from None
        finally:
            self.kill()
        if kind == "exit":
            raise SystemExit(value)
        if kind == "user error":
            raise UserError(value)
        if kind == "failure":
            raise Failure(value)
        return value

    def kill(self) -> None:
        """End the child and its own children."""
        for pid in (-(self._process.pid or 0), self._process.pid or 0):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # it may not have its group yet
                continue
        self._process.join()
        self._results.close()


def _run(function: Callable[[], Any], results: Connection, seconds: float) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(seconds) + 2)  # it ends also if its parent was killed
    found: tuple[str, Any]
    try:
        found = "result", function()
    except UserError as error:
        found = "user error", error.problems
    except SystemExit as error:
        found = "exit", error.code
    except KeyboardInterrupt:
        os._exit(signal.SIGINT + 128)
    except BaseException as error:
        if os.environ.get("TRAINER_PLAN_TRACEBACK"):
            traceback.print_exc()
        found = "failure", f"{type(error).__name__}: {one_line(error)}"
    results.send(found)
    results.close()
    os._exit(0)  # without destructors, which may wait for fake process groups
