"""A command at a real terminal, typed into line by line."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class Terminal:
    """A command whose input and output are a terminal of 80 columns, without colors."""

    def __init__(self, *command: str, cwd: Path) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | {"TERM": "dumb"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    def answer(self, question: str, line: str) -> str:
        """Type a line when it asks that; return what it has printed before the question."""
        before = self._read_until(lambda text: question in text)
        before, _, self._unread = before.partition(question)
        self._read_until(lambda text: text.rstrip().endswith(":"))
        os.write(self._master, f"{line}\n".encode())
        return before

    def end(self) -> tuple[int, str]:
        """Wait for its end and return its exit code and what it has printed since."""
        rest = self._read_until(None)
        return self._process.wait(timeout=600), rest

    def _read_until(self, holds: Callable[[str], bool] | None) -> str:
        """Return what has come up to where that holds, or up to its end."""
        deadline = time.monotonic() + 600
        while holds is None or not holds(self._unread):
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            new = self._read() if ready else ""
            if not new and holds is None:
                break
            assert new, f"it says no more after {self._unread!r}"
            self._unread += new
        read, self._unread = self._unread, ""
        return read

    def _read(self) -> str:
        try:
            return os.read(self._master, 65536).decode().replace("\r\n", "\n")
        except OSError:  # the command has closed its end
            return ""
