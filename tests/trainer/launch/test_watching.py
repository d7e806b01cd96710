"""What a launcher does with its ranks, and a rank with its peers, without a fit."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer.launch import start, watch
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.launch.watch import NodeLaunch, Watcher

# The first rank fails as soon as the second ignores SIGTERM.
IGNORES = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
FAILS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(3)
"""


def watched(folder: Path, *codes: str, argument: object = "") -> tuple[Any, list[int | None]]:
    """The failure of ranks that run this code, and how each has ended."""
    ranks: list[subprocess.Popen[bytes]] = []

    def begin() -> list[subprocess.Popen[bytes]]:
        for code in codes:
            command = [sys.executable, "-S", "-c", code, str(folder / "ready"), str(argument)]
            ranks.append(subprocess.Popen(command, process_group=0))
        return ranks

    try:
        failure = Watcher(begin, "fork", NodeLaunch(2, folder)).watch()
        return failure, [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


# Stops its launcher as Ctrl-Z does, with another process that continues it.
STOPS = """
import os, signal, subprocess, sys
words = [sys.executable, "-S", "-c", sys.argv[1], str(os.getppid()), str(os.getpid()), sys.argv[2]]
continues = subprocess.Popen(words, start_new_session=True)
os.kill(os.getppid(), signal.SIGTSTP)
continues.wait()
"""
CONTINUES = """
import os, signal, sys, time
from pathlib import Path
def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().split()[2]
while state(sys.argv[1]) != "T":
    time.sleep(0.01)
Path(sys.argv[3]).write_text(state(sys.argv[2]))
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_z_stops_the_ranks_too(tmp_path: Path) -> None:
    def begin() -> list[subprocess.Popen[bytes]]:
        (tmp_path / "state-0").write_text("started")
        command = [sys.executable, "-S", "-c", STOPS, CONTINUES, str(tmp_path / "state")]
        return [subprocess.Popen(command, process_group=0)]

    assert Watcher(begin, "fork", NodeLaunch(1, tmp_path)).watch() is None
    assert (tmp_path / "state").read_text() == "T"


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 0.2)
    failure, ended = watched(tmp_path, FAILS, IGNORES)
    assert (failure.rank, failure.code) == (0, 3)
    assert ended == [3, -signal.SIGKILL]


# The first rank has saved as soon as the second does, which takes long.
SAVES = """
import sys, time
open(sys.argv[1], "w").close()
time.sleep(float(sys.argv[2]))
sys.exit(128 + 15)
"""
SAVED = FAILS.replace("exit(3)", "exit(128 + 15)")


@pytest.mark.parametrize(("takes", "seconds", "code"), [(25, "1", -15), (2, "25", 143)])
def test_a_rank_has_its_time_to_save_after_the_others_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: float, seconds: str, code: int
) -> None:
    monkeypatch.setenv("TRAINER_SAVE_SECONDS", seconds)
    failure, ended = watched(tmp_path, SAVED, SAVES, argument=takes)
    assert failure.code == 143
    assert ended == [143, code]


@pytest.mark.parametrize("threads", [None, "", "7"])
def test_ranks_share_the_cores_unless_omp_num_threads_is_set(tmp_path, monkeypatch, threads):
    environments: list[dict[str, str]] = []

    class Started:
        def __init__(self, command: list[str], env: dict[str, str], **options: Any) -> None:
            environments.append(env)

    monkeypatch.setattr(start.subprocess, "Popen", Started)
    monkeypatch.setattr(os, "cpu_count", lambda: 13)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    list(start._start_copies(NodeLaunch(3, tmp_path, Layout()), tmp_path))
    assert [environment["OMP_NUM_THREADS"] for environment in environments] == [threads or "4"] * 3
    assert [environment["RANK"] for environment in environments] == ["0", "1", "2"]
    assert start.threads_each(99) == 1
