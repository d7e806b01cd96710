"""A loader's worker does not hang over what its parent's threads do, or earlier runs have left."""

import ctypes
import os
import sys
import threading
from hashlib import sha256

import pytest
import torch
from my_project_trainer.errors import UserError
from my_project_trainer.launch import rank, rendezvous, start
from tests.project import PATIENCE, run, succeed

from torch_versions import quiet_gloo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are seen in /proc")
PR_SET_NAME = 15  # linux/prctl.h
IS_FIXED = sys.version_info >= (3, 11, 10)


@quiet_gloo
def test_workers_of_a_second_fit_leave_the_first_one_s_process_group_alone(tmp_path):
    # Destroyed in a worker it would wait, without an end, for a thread of its parent.
    done = succeed(["-m", "twice_subject", tmp_path])
    left = [line for line in done.stdout.splitlines() if line.startswith("left:")]
    assert len(left) == 2
    assert "pt_gloo_runloop" in left[0]  # there was something to destroy; and its name is known
    assert "[rank0]: ValueError: shown" in (lines := done.stderr.splitlines())  # one prefix
    assert not any(line.startswith("[rank0]: [rank0]") for line in lines)


@pytest.mark.parametrize("name", ["pt_test", "test"])
def test_a_running_thread_is_seen_if_it_is_of_torch(name):
    runs, rests, ends = threading.Event(), threading.Event(), threading.Event()
    sees_itself = True

    def work() -> None:
        nonlocal sees_itself
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
        sees_itself = not is_idle()
        runs.set()
        while not rests.is_set():
            sha256(bytes(2**22)).digest()  # releases the GIL
        ends.wait()

    def is_seen(seconds: float) -> bool:
        return rendezvous.poll(rank._is_any_running, seconds, 0.001)

    def is_idle() -> bool:
        return rendezvous.poll(lambda: not rank._is_any_running(), 60, 0.001)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        runs.wait()
        assert not sees_itself
        assert is_seen(PATIENCE) if name == "pt_test" else not is_seen(0.5)
        rests.set()
        assert is_idle()
    finally:
        rests.set()
        ends.set()
        thread.join()


FORK = """
import os
from my_project_trainer.launch import rank
answers = [False, False, True, True]
rank._is_any_running = answers.pop
rank.keep_children_from_hanging()
rank.keep_children_from_hanging()
pid = os.fork()
if pid == 0:
    os._exit(len(answers))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_waits_until_torch_s_threads_are_idle():
    done = run(["-c", FORK])
    left = 4 if IS_FIXED else 1  # asked until False, and once
    assert done.stdout == f"{left}\n", done.stderr


def test_the_wait_is_bounded(monkeypatch):
    monkeypatch.setattr(rank, "_is_any_running", lambda: True)
    monkeypatch.setattr(rank, "_MOST_SECONDS", 0.01)
    rank._wait_for_threads()


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_a_count_through_cuda_is_seen_before_ranks_are_forked(monkeypatch, is_poisoned):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    parent = os.getpid()  # torch tells a forked process only
    bad = lambda: is_poisoned and os.getpid() != parent  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", bad)
    if not is_poisoned:
        start._check_can_fork({})
        return
    with pytest.raises(UserError, match="counted GPUs through CUDA, because NVML is missing"):
        start._check_can_fork({})
