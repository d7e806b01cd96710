"""Loggers that write to a service, whose values cannot be removed again."""

import importlib.util
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TextIO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from ..errors import ConfigurationError, one_line
from ..launch import files
from .base import LoggedRun, Logger

_SECONDS_TO_ANSWER = 5.0


class RemoteLogger(Logger):
    """Base of loggers that continue their run at a service when a run resumes.

    A folder of the run directory, with the name of the logger, has the id of the run at the service
    (``run.json``) and all values (``values.jsonl``), so that a resume sends none of them again.
    """

    _values: Path
    _file: TextIO
    _last: dict[str, int]

    def server(self) -> str | None:
        """URL of the service, which must answer before the run is opened; ``None``: no server."""
        return None

    def open(self, run: LoggedRun, known: str | None) -> str:
        """Open the run with a known id, or a new one; return its id."""
        raise NotImplementedError

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values of a step."""
        raise NotImplementedError

    def start(self, run: LoggedRun) -> None:
        """Open the run of the service.

        Raises:
            ConnectionError: It does not answer within five seconds. Its own client may wait for
                minutes.
        """
        if (url := self.server()) is not None:
            _check_answer(url)
        folder = run.directory / self.name
        folder.mkdir(exist_ok=True)
        record, self._values = folder / "run.json", folder / "values.jsonl"
        _cut_incomplete_line(self._values)
        self._last = {name: step for step, values in self.sent() for name in values}
        known = json.loads(record.read_text())["id"] if record.exists() else None
        service_id = self.open(run, known)
        files.write_private(record, json.dumps({"id": service_id}))
        self._file = self._values.open("a")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Send the values that were not sent before a resume."""
        given = {**values, "epoch": epoch}
        new = {name: each for name, each in given.items() if self._last.get(name, -1) < step}
        if new:
            self._file.write(json.dumps([step, new]) + "\n")
            self._file.flush()
            self._last.update(dict.fromkeys(new, step))
            self.send(step, new)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def sent(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the values of each earlier call."""
        for line in self._values.read_text().splitlines():
            step, values = json.loads(line)
            yield step, values


def _check_answer(url: str) -> None:
    """Raise ConnectionError if a server does not answer; an HTTP error is an answer."""
    parts = urlsplit(url)
    url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    answer: Future[None] = Future()

    def ask() -> None:
        try:
            urlopen(url, timeout=2 * _SECONDS_TO_ANSWER).close()  # noqa: S310 (of the user)
        except Exception as error:
            reason = getattr(error, "reason", error)
            if not isinstance(error, HTTPError) and not isinstance(reason, ssl.SSLError):
                answer.set_exception(error)
                return
        answer.set_result(None)

    # In a thread: a name server that does not answer has other timeouts.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer.result(_SECONDS_TO_ANSWER)
    except TimeoutError:
        raise ConnectionError(f"{url} does not answer within {_SECONDS_TO_ANSWER:g} s") from None
    except Exception as error:
        raise ConnectionError(f"{url} does not answer ({one_line(error)})") from error


def _cut_incomplete_line(path: Path) -> None:
    """Remove what a process that was killed while it wrote a line has left."""
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def require(package: str) -> None:
    """Raise ConfigurationError if the package of a logger is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"loggers: {package!r} needs the package {package}: make {package}, or "
            f"pip install '.[{package}]'"
        )
