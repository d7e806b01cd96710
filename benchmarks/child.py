"""Starts a measurement in fresh processes, each of which leaves a line of JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
STARTED = "BENCH_STARTED_NS"  # set just before a process is started
# Its file for what it has found: it may end where its output goes elsewhere.
RESULT = "BENCH_RESULT"
TIMEOUT = 900  # seconds; most measurements take about ten, on a busy machine minutes

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
# Without these glibc moves its thresholds by what it sees, and peaks differ from run to run. They
# stand where it would move them to: low ones cost the transformer half as much again, in page
# faults.
STEADY_PEAKS = ONE_THREAD | {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_ARENA_MAX": "1",
}
# Every tensor of more than 64 KiB is mapped alone and given back when it is freed, so that what is
# resident is what is alive.
FREED_IS_RETURNED = STEADY_PEAKS | {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
}


def measure(
    script: str, job: Any, variables: Mapping[str, str], ranks: int = 1, timeout: float = TIMEOUT
) -> list[Any]:
    """Run a script of this folder on each rank, with `job` as JSON; return what each has found."""
    command = [sys.executable, str(HERE / script), json.dumps(job, default=vars)]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shared = {**os.environ, **variables}
        children = [_Child(command, {**shared, **own}, folder) for own in rank_variables(ranks)]
        try:
            _await(children, timeout)
            results = [child.result() for child in children]
            logs = [log.read_text() for log in Path(folder).glob("runs/*/logs/*.log")]
        finally:
            for child in children:
                child.kill()
    if None not in results:
        return results
    words = [*(child.text for child in children), *logs]
    shown = "\n".join(each[-3000:] for each in words)
    raise SystemExit(f"{script} {job}: failed, or hangs; last words:\n{shown}")


def require_memory(needed: float, fewer: str) -> None:
    """Refuse what would fill the memory of this machine; `fewer`: what to give instead."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if free < needed:
        needs = f"this needs {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free"
        raise SystemExit(f"{needs}: give fewer {fewer}")


def end_with(result: Any) -> NoReturn:
    """End a measurement with what it has found, for `measure`, or on the terminal."""
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(json.dumps(result))
    else:
        print(json.dumps(result), flush=True)
    # What a framework does at exit is not measured, and must not cost the line above.
    os._exit(0)


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets. Its agent is left out: it would take time from the ranks it started."""
    if ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "bench",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]


def _await(children: list[_Child], timeout: float) -> None:
    """Wait until all have ended; not for those that wait for a rank that has failed."""
    deadline = time.monotonic() + timeout
    while None in (codes := [child.process.poll() for child in children]):
        if any(codes) or time.monotonic() > deadline:
            return
        time.sleep(0.1)


class _Child:
    """One process on a terminal of its own, so that progress bars do all they do for users."""

    def __init__(self, command: list[str], env: dict[str, str], folder: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self._result = Path(folder, f"result-{env.get('RANK', 0)}.json")
        env = {**env, RESULT: str(self._result), STARTED: str(time.monotonic_ns()), "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._master, 65536):
                self._output += piece
        except OSError:  # how Linux says that the other end of a terminal is closed
            pass

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._output.decode(errors="replace")

    def result(self) -> Any:
        """What it has found; ``None`` if it has not said so."""
        return json.loads(self._result.read_text()) if self._result.exists() else None

    def kill(self) -> None:
        """End it if it still runs: a rank does not outlive the failure of another."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._master)
