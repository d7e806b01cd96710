"""A checkpoint is synced to disk before it is complete; asynchronous checkpoints are isolated."""

import errno
import os
import re
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from my_project_trainer.checkpoint import tensor_files, writing
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.run_directory import complete
from my_project_trainer.errors import CheckpointError
from my_project_trainer.launch import collectives, files
from tests.project import ROOT
from torch import Tensor, nn

from fitting import Descends, quiet


class Events:
    """Names of files that are synced and renamed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._sync, self._rename = os.fsync, Path.rename
        monkeypatch.setattr(os, "fsync", self.sync)

        def rename(path: Path, target: Path) -> Path:
            self.names.append(f"{path.name} -> {target.name}")
            return self._rename(path, target)

        monkeypatch.setattr(Path, "rename", rename)

    def sync(self, descriptor: int) -> None:
        self.names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        self._sync(descriptor)


def test_all_files_of_a_checkpoint_are_synced_before_it_is_renamed(tmp_path, monkeypatch):
    checkpoints = writing.Checkpoints(tmp_path)
    events = Events(monkeypatch)
    checkpoints.save(7, {"model": {"weight": torch.ones(3)}}, {})
    partial = ".step-00000007.0.partial"
    assert events.names == [
        *("rank-00000.safetensors", partial),
        *("state.json", partial),
        f"{partial} -> step-00000007",
        tmp_path.name,
    ]


def test_a_file_that_another_rank_cannot_write_fails_the_save_on_rank_0(tmp_path, monkeypatch):
    failed = ["No space left on device (rank 1)", {}]
    monkeypatch.setattr(collectives, "gather", lambda value, group=None: [value, failed])
    checkpoints = writing.Checkpoints(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.save(7, {"model": {"weight": torch.ones(3)}}, {})
    problem = f"{tmp_path / 'step-00000007'}: cannot be saved: No space left on device (rank 1)"
    assert raised.value.problems == [f"{problem}; there is no checkpoint yet"]
    assert list(tmp_path.iterdir()) == []


def test_the_error_of_an_asynchronous_save_is_raised_by_the_next_wait(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = writing.Checkpoints(tmp_path, asynchronous=True)
    monkeypatch.setattr(tensor_files, "write", full)
    for wait in (checkpoints.wait, checkpoints.close):
        checkpoints.save(7, {"model": {"weight": torch.ones(3)}}, {})
        with pytest.raises(CheckpointError, match=r"No space left on device \(rank 0\)"):
            wait()
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        writing.Checkpoints(tmp_path).save(1, {"a": [torch.ones(1, dtype=torch.complex128)]}, {})
    assert raised.value.problems == [
        f"{tmp_path / 'step-00000001'}: cannot be saved: state/a/0 is a tensor of "
        "torch.complex128, which safetensors files cannot hold; convert it (rank 0); there is no "
        "checkpoint yet"
    ]


def test_equal_states_are_equal_files_that_the_umask_allows_to_read(tmp_path: Path) -> None:
    tensors = {f"{index}": torch.full((index,), 1.5) for index in range(20)}
    before = os.umask(0o027)
    try:
        paths = [tmp_path / name for name in ("one", "other")]
        checksums = [tensor_files.write(path, tensors, {"key": "text"}) for path in paths]
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o640, 0o640]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert checksums == [f"{zlib.crc32(path.read_bytes()):08x}" for path in paths]


def test_only_what_was_kept_is_removed_beside_what_is_kept(tmp_path: Path) -> None:
    checkpoints, best = writing.Checkpoints(tmp_path, keep=9), tmp_path / "best"
    for step in (1, 2):
        checkpoints.save(step, {"a": torch.ones(step)}, {})
        # As the Finder of macOS does, in whatever it shows.
        for folder in (best, checkpoints.path(step)):
            folder.mkdir(exist_ok=True)
            (folder / ".DS_Store").touch()
        (best / "notes").mkdir(exist_ok=True)
        writing.keep_copies(checkpoints.path(step), best, {f"step-{step:08}"})
    assert {path.name for path in best.iterdir()} == {".DS_Store", "notes", "step-00000002"}
    assert Checkpoint(best / "step-00000002").state()["a"].equal(torch.ones(2))
    assert Checkpoint(checkpoints.path(1)).state()["a"].equal(torch.ones(1))


def test_a_copy_is_as_private_as_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_link", lambda *_: False)
    (tmp_path / "own").write_text("text")
    (tmp_path / "own").chmod(0o600)
    files.copy(tmp_path / "own", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "text"
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


def test_one_module_does_what_a_file_system_may_refuse() -> None:
    calls = re.compile(r"symlink_to|os\.link\(|hardlink|chmod|copy2|copystat|copytree|rmtree\(")
    paths = ROOT.glob("src/*_trainer/**/*.py")
    assert {path.name for path in paths if calls.search(path.read_text())} == {"files.py"}


def test_checkpoints_are_set_aside_from_the_newest_on(tmp_path, monkeypatch):
    checkpoints = writing.Checkpoints(tmp_path, keep=9)
    for step in range(1, 5):
        checkpoints.save(step, {}, {})
    rename, moved = Path.rename, list[str]()

    def killed(path: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        writing.set_aside(tmp_path, tmp_path / "step-00000001")
    assert [path.name[-1] for path in complete(tmp_path)] == ["1", "2", "3"]


class Line(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).sum()


@pytest.mark.parametrize(
    ("asynchronous", "thread"), [(True, "checkpoint_0"), (False, "MainThread")]
)
def test_async_checkpoints_are_written_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, thread: str
) -> None:
    written: set[str] = set()
    write = writing._write_rank

    def noting(*arguments: Any) -> Any:
        written.add(threading.current_thread().name)
        return write(*arguments)

    monkeypatch.setattr(writing, "_write_rank", noting)
    module = Line()
    shared = {"max_epochs": 1, "run_name": "run", "default_root_dir": tmp_path}
    shared |= {"async_checkpoints": asynchronous, "checkpoint_every_n_steps": 1}
    quiet(**shared).fit(module, [torch.ones(1)] * 3)
    assert written == {thread}
    # Each has the weights of its step, though training continued.
    newest = complete(tmp_path / "run" / "checkpoints")
    assert [path.name for path in newest] == ["step-00000002", "step-00000003"]
    weights = [Checkpoint(path).state()["model"]["weight"] for path in newest]
    assert weights[1].equal(module.weight)
    assert weights[0].item() == pytest.approx(0.8)


@pytest.mark.usefixtures("group")
def test_the_asynchronous_writer_has_a_separate_process_group(tmp_path, monkeypatch):
    used: list[Any] = []
    plain = collectives.gather  # which broadcast calls, too
    monkeypatch.setattr(
        collectives, "gather", lambda value, group=None: used.append(group) or plain(value)
    )
    checkpoints = writing.Checkpoints(tmp_path, asynchronous=True)
    checkpoints.save(1, {"model": {"weight": torch.ones(3)}}, {})
    checkpoints.close()
    assert len(used) == 2
    assert all(isinstance(group, dist.ProcessGroup) for group in used)
    assert dist.group.WORLD not in used
