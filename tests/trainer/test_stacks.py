"""What is said of a rank that hangs or fails: by its stack, its error, the other nodes."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.launch.failures import reports as failures
from my_project_trainer.launch.failures import stacks, watchdog


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
    assert failures._is_lost_peer(of_user)
    assert failures._reason(of_user) == "Connection closed by peer [127.0.0.1]:1253"
    assert not failures._is_lost_peer(raised_for(ValueError("mine"), lost(), explicit))


def test_a_stack_is_read_from_its_file(tmp_path):
    printer = stacks.Printer(tmp_path / "stack", fatal_too=True)
    try:
        calls = stacks.request(os.getpid(), tmp_path / "stack").splitlines()
    finally:
        printer.close()
    assert [call.rpartition(" in ")[2] for call in calls[-2:]] == [
        "test_a_stack_is_read_from_its_file",
        "request",
    ]
    assert stacks.of_fault(tmp_path / "stack") == ""


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

Extension modules: numpy (total: 1)
"""


def test_a_fault_s_stack_is_that_of_its_thread(tmp_path):
    (tmp_path / "stack").write_text(FAULT)
    expected = """\
  File "cli.py", line 1 in main
  File "external.py", line 28 in run_external
  File "model.py", line 9 in outer
  File "model.py", line 2 in inner"""
    assert stacks.of_fault(tmp_path / "stack") == expected
    assert not stacks.is_in_collective(expected)
    assert stacks.is_in_collective(f'{expected}\n  File "/v/torch/distributed/x.py", line 1 in f')


WAITS = """\
loss.item()
values = logged.tolist()
total = float(loss)
data = next(batches)
"""


def test_a_gpu_is_waited_for_where_a_value_is_read(tmp_path):
    (tmp_path / "model.py").write_text(WAITS)
    places = [f'  File "{tmp_path}/model.py", line {line} in step' for line in (1, 2, 3, 4)]
    waits = [stacks.is_in_collective(f"  File x\n{place}", on_gpu=True) for place in places]
    assert waits == [True, True, True, False]
    assert not any(stacks.is_in_collective(place) for place in places)
    assert not stacks.is_in_collective('  File "gone.py", line 1 in step', on_gpu=True)


def test_a_rank_that_waits_for_its_gpu_is_not_said_to_hang(tmp_path, monkeypatch):
    """Rank 1 stands in `item()`, rank 2 elsewhere: rank 2 is the one that hangs."""
    (tmp_path / "model.py").write_text(WAITS)
    stands = {"1": 1, "2": 4}

    def ask(process: int, path: Path) -> str:
        return f'  File "{tmp_path}/model.py", line {stands[path.parent.name]} in step'

    monkeypatch.setattr(watchdog.stacks, "request", ask)
    monkeypatch.setattr(watchdog._Peer, "state", lambda self: "S")
    guard = watchdog.Watchdog()
    guard._peers = [
        watchdog._Peer(rank, "here", os.getpid(), "", str(tmp_path / str(rank))) for rank in (1, 2)
    ]
    guard._losses = {0: "  File x"}
    for on_gpu, fates in ((True, "rank 2 hangs"), (False, "rank 1 hangs, rank 2 hangs")):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda on_gpu=on_gpu: on_gpu)
        told = guard.describe_hang("timed out")
        assert told.splitlines()[-1] == f"{fates}: rank 0 timed out (timed out)"


def test_a_process_that_cannot_be_asked_is_said_to(tmp_path):
    with subprocess.Popen(["true"]) as process:
        process.wait()
    (tmp_path / "stack").touch()
    assert stacks.request(process.pid, tmp_path / "stack") == "  (unknown: No such process)"


def test_where_none_hangs_here_the_other_nodes_are_named():
    def rank(number: int, host: str) -> Any:
        return watchdog._Peer(number, f"{host} pid:[1]", 1, "1", "none")

    guard = watchdog.Watchdog()
    guard._peers_on_other_nodes = [
        rank(number, host) for number, host in enumerate(("b", "b", "c"))
    ]
    assert guard.other_nodes_hint() == "no rank on this node hangs: look at b and c"
    guard._peers_on_other_nodes = []
    assert guard.other_nodes_hint() is None
