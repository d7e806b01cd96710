"""The store of a launch on one node: a file that nobody else can open, and that is removed."""

import datetime
import fcntl
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from my_project_trainer import errors
from my_project_trainer.launch import cluster, rendezvous
from tests.project import PACKAGE, run, start

from processes import at_root
from test_launch import launched, model, wait_for_ranks

SOON = datetime.timedelta(seconds=0.2)


@pytest.mark.slow
def test_the_store_of_our_launcher_is_a_file_that_is_removed(tmp_path: Path) -> None:
    variables = at_root() | {"TMPDIR": str(tmp_path), "TRAINER_SAVE_SECONDS": "2"}
    command = launched("ours", *model("Sleeps", tmp_path))
    process = start(command, cwd=tmp_path, extra=variables, fresh=True)
    try:
        ranks = wait_for_ranks(tmp_path, process)
        (store,) = tmp_path.glob("trainer-launch-*/store")
        assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
        assert {rank.environ()["TRAINER_STORE"] for rank in ranks} == {str(store)}
        connections = psutil.Process(process.pid).net_connections("inet")
        assert [each for each in connections if each.status == psutil.CONN_LISTEN] == []
    finally:
        process.terminate()
        process.communicate()
    assert not store.parent.exists()


def layout(rank: int, launch: str) -> object:
    """Of a rank of two that srun, say, has started."""
    return cluster.Layout(
        rank=rank,
        local_rank=rank,
        world_size=2,
        local_world_size=2,
        source="srun",
        launch_id=launch,
    )


def test_ranks_of_another_launcher_meet_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_SUBMIT_DIR", raising=False)
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    undo: list[object] = []
    monkeypatch.setattr(
        rendezvous.atexit, "register", lambda *what, **how: undo.append((what, how))
    )
    long = datetime.timedelta(seconds=600)
    with ThreadPoolExecutor(2) as executor:
        ranks = [layout(rank, "1.0.0") for rank in range(2)]
        stores = list(executor.map(lambda each: rendezvous.connect_store(each, long), ranks))
    (folder,) = tmp_path.glob("trainer-store-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    told = tmp_path / ".rendezvous-1.0.0"
    assert told.read_text() == str(folder)
    assert stat.S_IMODE(told.stat().st_mode) == 0o600
    assert len(stores) == 2
    for (function, *arguments), how in undo:
        function(*arguments, **how)
    assert list(tmp_path.iterdir()) == []


def test_what_another_user_may_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_SUBMIT_DIR", raising=False)
    told, folder = tmp_path / ".rendezvous-x", tmp_path / "folder"
    told.write_text(str(folder))
    with pytest.raises(errors.UserError, match="which this rank cannot see"):
        rendezvous.connect_store(layout(1, "x"), SOON)
    folder.mkdir(mode=0o755)
    with pytest.raises(errors.UserError, match="is not a folder that only this user can open"):
        rendezvous.connect_store(layout(1, "x"), SOON)
    folder.chmod(0o700)
    with pytest.raises(errors.UserError, match=r"rank 0 did not join within 0\.2 s"):
        rendezvous.connect_store(layout(1, "x"), SOON)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(errors.UserError, match=r"was written by another user \(id \d+\)"):
        rendezvous.connect_store(layout(1, "x"), SOON)


def test_a_rank_that_is_stopped_with_the_store_s_lock_does_not_hold_the_others_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    (tmp_path / "present-1").touch()
    monkeypatch.setenv(cluster.STORE, str(store))
    rank = cluster.Layout(world_size=2, local_world_size=2, source="environment")
    with store.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a rank would that is stopped just then
        with pytest.raises(errors.UserError) as raised:
            rendezvous.connect_store(rank, SOON)
    assert raised.value.problems == [
        f"{store} was locked for 0.2 s: a rank may be stopped (SIGSTOP, or a debugger) while it "
        "holds the lock of the store's file"
    ]


def test_what_waits_in_the_kernel_is_ended_from_another_thread() -> None:
    told: list[str] = []
    ended = threading.Event()

    def end(error: Exception) -> None:
        told.append(str(error))
        ended.set()

    with rendezvous.exit_if_stuck(0.05, end):
        assert ended.wait(600)
    assert told == [
        "initializing the process group did not finish within 0.05 s: a rank may be stopped "
        "(SIGSTOP, or a "
        "debugger) while it holds the lock of the store's file"
    ]
    with rendezvous.exit_if_stuck(600, end):
        pass
    assert len(told) == 1


def test_a_rank_that_is_ended_so_tells_why() -> None:
    """At once, whatever its other threads wait for."""
    code = (
        f"import threading; from {PACKAGE}_trainer import launch, UserError\n"
        "threading.Thread(target=launch.end_process, args=[UserError('stuck')]).start()\n"
        "threading.Event().wait()"
    )
    done = run(["-c", code], extra={"RANK": "3"})
    assert (done.returncode, done.stderr) == (2, "rank 3: error: stuck\n")
