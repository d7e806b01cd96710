"""Starts one measurement in fresh processes and reads what it prints."""

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
from pathlib import Path

from meter import STARTED, Job
from one import MARK

HERE = Path(__file__).parent
TIMEOUT = 900  # seconds; a measurement takes about ten, on a busy machine minutes

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
# Without these glibc moves its thresholds by what it sees, and peaks differ from run to run. They
# stand where it would move them to: low ones cost the transformer half as much again, in page
# faults.
STEADY_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_ARENA_MAX": "1",
}


def measure(job: Job, ranks: int, source: Path) -> dict[str, float]:
    """Run `job` on `ranks` processes; of several, the mean time and the largest memory."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shared = {**os.environ, **ONE_THREAD, **STEADY_MEMORY, "PYTHONPATH": str(source)}
        children = [_Child(job, {**shared, **env}, folder) for env in rank_variables(ranks)]
        try:
            results = [child.result() for child in children]
        finally:
            for child in children:
                child.kill()
    means = {key: sum(r[key] for r in results) / ranks for key in results[0]}
    return means | {key: max(r[key] for r in results) for key in ("first_step_s", "peak_mb")}


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


class _Child:
    """One process on a terminal of its own, so that progress bars do all they do for users."""

    def __init__(self, job: Job, env: dict[str, str], folder: str) -> None:
        rank = env.get("RANK", "0")
        self.name = f"{job.contestant} {job.variant} {job.subject}, rank {rank}"
        command = [sys.executable, str(HERE / "one.py"), job.contestant, job.variant, job.subject]
        command += [f"--warmup={job.warmup}", f"--steps={job.steps}", f"--epoch={job.epoch}"]
        command += ["--fused"] * job.fused
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        env = {**env, STARTED: str(time.monotonic_ns()), "TERM": "xterm"}
        self._process = subprocess.Popen(
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

    def result(self) -> dict[str, float]:
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{self.name}: hangs; its last words:\n{self._words()}") from None
        self._reader.join(10)
        text = self._output.decode(errors="replace")
        for line in text.splitlines():
            if line.startswith(MARK):
                result: dict[str, float] = json.loads(line.removeprefix(MARK))
                return result
        raise SystemExit(f"{self.name}: no result; its last words:\n{self._words()}")

    def kill(self) -> None:
        """End it if it still runs: a rank does not outlive the failure of another."""
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        os.close(self._master)

    def _words(self) -> str:
        return self._output.decode(errors="replace")[-3000:]
