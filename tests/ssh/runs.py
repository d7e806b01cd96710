"""A rendered project on hosts, and the runs that `ssh/train.sh` starts there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from slurm.jobs import Rows, fit_alone, read_metrics, until

from .hosts import Hosts


@dataclass(frozen=True)
class Project:
    """A rendered project whose runs go to hosts."""

    network: Hosts
    folder: Path

    def start(self, hosts: str, name: str, *fit: str, **extra: str) -> Run:
        """Start `ssh/train.sh` on `login`, with a file of hosts and options of `fit`."""
        (self.folder / f"hosts-{name}").write_text(hosts, encoding="utf-8")
        script = ("bash", "ssh/train.sh", f"hosts-{name}", *fit, f"--trainer.run_name={name}")
        # Not ignored, as it is where a script has started the tests in the background.
        login = ("env", "--default-signal=INT", "-C", str(self.folder))
        command = self.network.inside("login", *login, *script)
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.network.environment(**extra),
                start_new_session=True,
            )
        return Run(self, name, process, log)

    def fit_alone(self, name: str, *fit: str) -> Rows:
        """Train in one process, without ssh, and return its metrics."""
        return fit_alone(self.folder, self.network.environment(), name, *fit)

    def left_on(self, name: str, timeout: float = 600) -> list[str]:
        """Return the commands that still run on a host, if they do not end."""
        end = time.monotonic() + timeout
        while (pids := self.network.processes(name)) and time.monotonic() < end:
            time.sleep(0.1)
        lines = [Path(f"/proc/{pid}/cmdline") for pid in pids]
        return [line.read_bytes().replace(b"\0", b" ").decode() for line in lines if line.exists()]


@dataclass(frozen=True)
class Run:
    project: Project
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    @property
    def directory(self) -> Path:
        return self.project.folder / "runs" / self.name

    def metrics(self) -> Rows:
        return read_metrics(self.directory)

    def reach(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.said
            rows = self.metrics()
            return bool(rows) and int(rows[-1][0]) >= step

        until(reached, lambda: f"step {step} of {self.name}:\n{self.said}")

    def end(self, number: signal.Signals | None = None, timeout: float = 600) -> int:
        """Send a signal, if one is given, as a terminal does; return the exit code."""
        if number is not None:
            os.killpg(self.process.pid, number)
        return self.process.wait(timeout=timeout)
