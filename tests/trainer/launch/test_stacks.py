"""What is said of a rank that hangs or fails: by its stack and its error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from my_project_trainer.launch import failures, hangs, reports
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.launch.watch import NodeLaunch, Watcher
from tests.project import run

from processes import at_root


def lost() -> RuntimeError:
    """What gloo says where a peer has gone."""
    return RuntimeError(
        "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:1253. This is typically caused by a remote worker crashing. GLHF!"
    )


def raised_for(first: Exception, then: Exception, explicit: bool) -> Exception:
    """An error that was raised for another, or while that was handled."""
    then.__context__ = first
    if explicit:
        then.__cause__ = first
    return then


@pytest.mark.parametrize("explicit", [True, False])
def test_an_error_counts_as_what_it_was_raised_for(explicit):
    of_user = raised_for(lost(), ValueError("while averaging"), explicit)
    assert failures.is_lost_peer(of_user)
    assert failures.reason(of_user) == "Connection closed by peer [127.0.0.1]:1253"
    assert not failures.is_lost_peer(raised_for(ValueError("mine"), lost(), explicit))


def test_a_stack_is_printed_on_a_signal(tmp_path):
    timer, path = hangs.HangTimer(), tmp_path / "stack"
    timer.arm(600, path)
    try:
        calls = hangs.request(os.getpid(), path).splitlines()
        assert not hangs.has_timed_out(path)
    finally:
        timer.disarm()
    assert [call.rpartition(" in ")[2] for call in calls[-2:]] == [
        "test_a_stack_is_printed_on_a_signal",
        "request",
    ]


TIMED = """
import sys, time
from pathlib import Path
from PACKAGE_trainer.launch import hangs
hangs._MARGIN_SECONDS = 0
hangs.timer.arm(1.5, Path("stack") if len(sys.argv) > 1 else None)
hangs.timer.begin("training")
time.sleep(2)  # the first batch of all may take any time
for _ in range(20):
    hangs.timer.note_batch()
    time.sleep(0.2)
hangs.timer.pause()
time.sleep(2)
hangs.timer.begin("evaluation")
time.sleep(2)
hangs.timer.begin("training")
def hang():
    time.sleep(600)
hang()
"""


@pytest.mark.slow
@pytest.mark.parametrize("to_file", [True, False])
def test_the_timer_ends_a_batch_that_takes_too_long_and_nothing_else(tmp_path, to_file):
    code = TIMED.replace("PACKAGE", reports.__name__.partition("_trainer")[0])
    done = run(["-c", code, *["file"] * to_file], cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    if not to_file:
        assert done.stderr.startswith("Timeout (0:00:01.500000)!")
        assert ' in hang\n  File "<string>"' in done.stderr
        return
    assert done.stderr == ""
    assert hangs.has_timed_out(tmp_path / "stack")
    assert hangs.printed(tmp_path / "stack").endswith(" in hang")


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_alone_is_limited_if_an_agent_could_start_it_again(monkeypatch, by_torchrun):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    try:
        reports.watch_for_hangs(600)
        assert (hangs.timer._file is not None) == by_torchrun
    finally:
        hangs.timer.disarm()


FAULT = """\
Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "model.py", line 2 in inner
  File "module.py", line 5 in _call_impl
  File "model.py", line 9 in outer
  File "external.py", line 28 in run_external
  File "cli.py", line 1 in main

Thread 0x3 (most recent call first):
  File "threading.py", line 1 in wait

Extension modules: numpy (total: 1)
"""


def test_a_fault_s_stack_is_that_of_its_thread(tmp_path):
    (tmp_path / "stack").write_text(FAULT)
    expected = """\
  File "cli.py", line 1 in main
  File "external.py", line 28 in run_external
  File "model.py", line 9 in outer
  File "model.py", line 2 in inner"""
    assert hangs.printed(tmp_path / "stack") == expected
    assert hangs.printed(tmp_path / "none") == ""
    assert not hangs.waits_for_peers(expected)
    assert hangs.waits_for_peers(f'{expected}\n  File "/v/torch/distributed/x.py", line 1 in f')


WAITS = """\
loss.item()
values = logged.tolist()
total = float(loss)
data = next(batches)
"""


def test_a_gpu_is_waited_for_where_a_value_is_read(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(WAITS)
    places = [f'  File "{tmp_path}/model.py", line {line} in step' for line in (1, 2, 3, 4)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    waits = [hangs.waits_for_peers(f"  File x\n{place}") for place in places]
    assert waits == [True, True, True, False]
    assert not hangs.waits_for_peers('  File "gone.py", line 1 in step')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not any(map(hangs.waits_for_peers, places))


def test_a_process_that_prints_no_stacks_is_not_signaled(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert hangs.request(process.pid, tmp_path / "stack") == "  (unknown)"
    assert process.returncode == 1  # of input(), and not -SIGUSR2


WAITS_AT = """\
Timeout (0:00:10)!
Thread 0x1 (most recent call first):
  File "torch/distributed/x.py", line 1 in f
"""
HANGS_AT = WAITS_AT.replace("torch/distributed", "model")
ABORTED = WAITS_AT.replace("Timeout (0:00:10)!", "Fatal Python error: Aborted\n")


class Ended:
    pid = 2**22 + 1

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@pytest.mark.parametrize(
    ("codes", "stacks", "last"),
    [
        ((1, 1), (WAITS_AT, HANGS_AT), "rank 1 hangs: rank 0 timed out ("),
        ((1, 1, 1), (HANGS_AT, WAITS_AT, WAITS_AT), "rank 0 hangs: ranks 1 and 2 timed out ("),
        ((1, 1, 1), (WAITS_AT, HANGS_AT, HANGS_AT), "ranks 1 and 2 hang: rank 0 timed out ("),
        ((-signal.SIGABRT, 1), (ABORTED, HANGS_AT), "rank 1 hangs: rank 0 timed out ("),
        ((-signal.SIGABRT, 1), (ABORTED, WAITS_AT), "rank 0 waited for peers until a timeout"),
        ((1, -signal.SIGABRT), (WAITS_AT, FAULT), "rank 1 was killed by SIGABRT"),
        ((1, 3), (WAITS_AT, ""), "rank 1 exited with code 3"),
    ],
)
def test_the_rank_is_named_for_which_the_others_wait(tmp_path, codes, stacks, last):
    for rank, text in enumerate(stacks):
        reports.stack_file(tmp_path, rank).write_text(text)
    ended = [Ended(code) for code in codes]
    failure = Watcher(lambda: ended, "fork", NodeLaunch(len(codes), tmp_path)).watch()
    assert failure is not None
    assert failure.message.splitlines()[-1].startswith(last)


def test_where_none_hangs_on_this_node_the_other_nodes_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        report = {"rank": rank, "code": 1, "message": f"rank {rank}: closed", "time": 2.0 - rank}
        text = json.dumps(report | {"reason": "closed", "lost_at": "  File x"})
        (tmp_path / f"rank-{rank}.json").write_text(text)
    place = NodeLaunch(2, tmp_path, Layout(world_size=4, num_nodes=2))
    failure = Watcher(lambda: [Ended(1), Ended(1)], "fork", place).watch()
    assert failure is not None
    assert failure.message.splitlines() == [
        "rank 1: closed",
        "no rank on this node hangs: look at the other nodes",
    ]
