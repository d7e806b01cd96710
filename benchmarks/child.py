"""Starts a measurement in fresh processes, each of which leaves a line of JSON."""

import json
import os
import pty
import socket
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
# The file for its result: its output may go elsewhere when it ends.
RESULT = "BENCH_RESULT"
TIMEOUT = 1800  # seconds; most measurements take about ten, the longest some minutes

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


def measure(script: str, job: Any, variables: Mapping[str, str], ranks: int = 1) -> list[Any]:
    """Run a script of this folder on each rank, with `job` as JSON; return the result of each."""
    command = [sys.executable, str(HERE / script), json.dumps(job, default=vars)]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        children = [
            _Child(command, {**os.environ, **variables, **of_rank}, folder)
            for of_rank in rank_variables(ranks)
        ]
        try:
            _await(children)
            results = [child.result() for child in children]
            logs = [log.read_text() for log in Path(folder).glob("runs/*/logs/*.log")]
        finally:
            for child in children:
                child.kill()
    if None not in results:
        return results
    last_words = "\n".join(text[-3000:] for text in [*(child.text for child in children), *logs])
    raise SystemExit(f"{script} {job}: failed, or hangs; last words:\n{last_words}")


def argument() -> Any:
    """The job that `measure` has given this process."""
    return json.loads(sys.argv[1])


def end_with(result: Any) -> NoReturn:
    """End a measurement with its result, for `measure`, or on the terminal."""
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
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "bench"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _await(children: list["_Child"]) -> None:
    """Wait until all have ended; not for those that wait for a rank that has failed."""
    deadline = time.monotonic() + TIMEOUT
    while None in (codes := [child.process.poll() for child in children]):
        if any(codes) or time.monotonic() > deadline:
            return
        time.sleep(0.1)


class _Child:
    """One process on a terminal of its own, so that progress bars do all they do for users."""

    def __init__(self, command: list[str], env: dict[str, str], folder: str) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 100))
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
        """Its result; `None` if it has left none."""
        return json.loads(self._result.read_text()) if self._result.exists() else None

    def kill(self) -> None:
        """End it if it still runs: a rank does not outlive the failure of another."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._master)
