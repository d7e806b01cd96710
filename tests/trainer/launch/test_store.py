"""The store of a launch on one node: a file that nobody else can open, and that is removed."""

import datetime
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from my_project_trainer import errors
from my_project_trainer.launch import cluster, held_folders, rendezvous
from test_launch import launched, model, wait_for_ranks
from tests.project import PACKAGE, run, start

from processes import at_root

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
        assert [endpoint for endpoint in connections if endpoint.status == psutil.CONN_LISTEN] == []
    finally:
        process.terminate()
        process.communicate()
    assert not store.parent.exists()


def layout(rank: int, launch: str) -> object:
    """Of a rank of two that srun, say, has started."""
    place = {"rank": rank, "local_rank": rank, "world_size": 2, "local_world_size": 2}
    return cluster.Layout(**place, source="srun", launch_id=launch)


def test_ranks_of_another_launcher_meet_in_a_private_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    undo: list[object] = []
    note = lambda *what, **how: undo.append((what, how))  # noqa: E731
    monkeypatch.setattr(rendezvous.atexit, "register", note)
    long = datetime.timedelta(seconds=600)
    with ThreadPoolExecutor(2) as executor:
        ranks = [layout(rank, "1.0.0") for rank in range(2)]
        stores = list(executor.map(lambda each: rendezvous.connect_store(each, long), ranks))
    (folder,) = tmp_path.glob("trainer-store-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(stores) == 2
    for (function, *arguments), how in undo:
        function(*arguments, **how)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_launches_are_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", os.curdir)  # as TMPDIR=. sets it
    monkeypatch.setattr(rendezvous.atexit, "register", lambda *_, **how: None)
    store = f"trainer-store-{os.geteuid()}-"
    names = [f"{prefix}{what}" for prefix in ("trainer-launch-", store) for what in "abc"]
    left, held, strange = names[::3], names[1::3], names[2::3]
    for name in left:
        os.close(held_folders.hold(tmp_path / name))  # as the kernel does when a process is killed
        (tmp_path / name / "store").write_text("")
    descriptors = [held_folders.hold(tmp_path / name) for name in held]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / ".lock").write_text("")
    for name in strange:
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with held_folders.private_folder("trainer-launch-") as folder:
        assert not (tmp_path / left[0]).exists()
        assert (tmp_path / left[1]).exists()
        file = rendezvous._private_file(layout(0, "x"))  # type: ignore[arg-type]
        assert (file, folder.parent) == (tmp_path / f"{store}x" / "store", tmp_path)
        assert folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {*held, *strange, f"{store}x", "precious"}
    assert (tmp_path / "precious" / ".lock").exists()
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_folder_that_others_can_open_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"trainer-store-{os.geteuid()}-x"
    folder.mkdir()
    for mode in (0o755, 0o750, 0o720):
        folder.chmod(mode)
        with pytest.raises(errors.UserError, match="is not a folder that only this user can open"):
            rendezvous.connect_store(layout(1, "x"), SOON)
    folder.chmod(0o700)
    with pytest.raises(errors.UserError, match=r"rank 0 did not join within 0\.2 s"):
        rendezvous.connect_store(layout(1, "x"), SOON)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    (tmp_path / "trainer-store-12345-x").mkdir(mode=0o700)
    with pytest.raises(errors.UserError, match="is not a folder that only this user can open"):
        rendezvous.connect_store(layout(1, "x"), SOON)


def test_a_port_that_another_user_has_written_is_refused(tmp_path, monkeypatch):
    path = tmp_path / ".rendezvous-x"
    with pytest.raises(errors.UserError, match=r"did not write its port to .* within 0\.2 s"):
        rendezvous._await_address(path, SOON)
    path.write_text("1")
    assert rendezvous._await_address(path, SOON) == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(errors.UserError, match=r"was written by another user \(id \d+\)"):
        rendezvous._await_address(path, SOON)


LIMITED = f"""
import fcntl, os
from {PACKAGE}_trainer.launch import hangs
fcntl.flock(os.open("lock", os.O_CREAT), fcntl.LOCK_EX)
with hangs.limited(600):
    pass
with hangs.limited(0.2):
    fcntl.flock(os.open("lock", os.O_CREAT), fcntl.LOCK_EX)
"""


def test_what_waits_in_the_kernel_is_ended_with_its_stack(tmp_path: Path) -> None:
    """So the others wait for a rank that is stopped while it has locked the store's file."""
    done = run(["-c", LIMITED], cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:00.200000)!")
    assert 'File "<string>", line 8 in <module>' in done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_port_in_use_is_one_line(nodes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        where = {"main_address": "127.0.0.1", "main_port": port, "num_nodes": nodes}
        first = cluster.Layout(world_size=2, local_world_size=2 // nodes, source="srun", **where)
        line = f"the store of rank 0 cannot be served at 127.0.0.1:{port}: .*in use"
        with pytest.raises(errors.TemporaryError, match=line):
            rendezvous.connect_store(first, SOON)
