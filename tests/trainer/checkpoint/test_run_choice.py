"""Which directory a run writes and which checkpoint it resumes from; nobody else's is touched."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Trainer, errors
from my_project_trainer.checkpoint import run_choice as choice
from my_project_trainer.checkpoint import run_directory, run_lock
from my_project_trainer.checkpoint import writing as writer
from my_project_trainer.cli.results import Results
from my_project_trainer.launch import rank, reports
from my_project_trainer.launch.cluster import Layout
from test_lineage import Model, content, steps
from tests.project import ROOT


def save(run: Path, *steps: int) -> Path:
    """Save checkpoints into a run's directory; the newest."""
    checkpoints = writer.Checkpoints(run / "checkpoints", keep=100)
    for step in steps:
        checkpoints.save(step, {"step": step, "tensor": torch.full((3,), float(step))}, {})
    return run / "checkpoints" / f"step-{steps[-1]:08d}"


def choose(root: Path, name: str | None, resume: str | None, **more: Any) -> Any:
    lock = run_lock.RunLock()
    try:
        return choice.choose(choice.Request(root, name, resume, **more), Layout(), lock)
    finally:
        lock.close()


def refused(root: Path, name: str | None, resume: str | None, **more: Any) -> list[str]:
    with pytest.raises(errors.UserError) as raised:
        choose(root, name, resume, **more)
    problems: list[str] = raised.value.problems
    return problems


def damage(path: Path) -> Path:
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_a_fresh_start(tmp_path: Path) -> None:
    assert choose(tmp_path, "mine", None) == choice.Selection(tmp_path / "mine")
    # Nothing was written yet: it may be tried again.
    assert choose(tmp_path, "mine", None) == choice.Selection(tmp_path / "mine")


@pytest.mark.parametrize("name", ["mine", None])
def test_auto_without_a_checkpoint_starts_fresh(tmp_path: Path, name: str | None) -> None:
    chosen = choose(tmp_path, name, "auto")
    assert chosen.directory.parent == tmp_path
    assert chosen.checkpoint is None


def test_only_a_new_run_needs_the_directory_of_runs(tmp_path: Path) -> None:
    root, saved = tmp_path / "file" / "runs", save(tmp_path / "mine", 3)
    root.parent.touch()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=root)
    of_run, of_none = (Results(path, root, None, tmp_path) for path in (saved, None))
    choice.check_new(choice.Request(root, None, str(saved)))
    of_run.check()
    for call in (trainer.fit, trainer.find_learning_rate, lambda *_: of_none.check()):
        with pytest.raises(errors.ConfigurationError, match=r"runs': .*/file is a file$"):
            call(Model(), [])


def test_a_run_whose_record_is_another_user_s_is_not_continued(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "mine"), 3)
        record = Path(folder, "mine", "run.json")
        record.touch(mode=0)
        for path in (record.parent, record.parents[1]):
            path.chmod(0o777)
        user = os.getuid()
        try:
            os.setresuid(user or 65534, user or 65534, user)
            (line,) = refused(Path(folder), "mine", "auto")
        finally:
            os.setresuid(user, user, user)
        assert "the run belongs to another user: its run.json cannot be read" in line
        assert [path.name for path in record.parent.glob("run.*")] == ["run.json"]


def test_auto_resumes_from_the_newest_of_the_run(tmp_path: Path) -> None:
    newest = save(tmp_path / "mine", 3, 4)
    save(tmp_path / "other", 9)
    assert choose(tmp_path, "mine", "auto") == choice.Selection(tmp_path / "mine", newest, True)


def test_the_newest_is_that_of_the_largest_number(tmp_path: Path) -> None:
    save(tmp_path / "mine", 99_999_999, 100_000_000)
    assert choose(tmp_path, "mine", "auto").checkpoint.name == "step-100000000"


def test_a_run_is_resumed_in_its_directory(tmp_path: Path) -> None:
    newest = save(tmp_path / "mine", 3, 4)
    same = choice.Selection(tmp_path / "mine", newest, True)
    assert choose(tmp_path, None, str(tmp_path / "mine")) == same
    assert choose(tmp_path, None, str(tmp_path / "mine" / "checkpoints")) == same
    assert choose(tmp_path, "mine", str(newest)) == same


def test_a_run_of_another_name_begins_with_the_checkpoint(tmp_path: Path) -> None:
    newest = save(tmp_path / "mine", 3)
    chosen = choose(tmp_path, "other", str(tmp_path / "mine"))
    assert chosen == choice.Selection(tmp_path / "other", newest, False)


def test_it_begins_with_it_again_until_it_has_saved_itself(tmp_path: Path) -> None:
    newest = save(tmp_path / "mine", 3)
    other = tmp_path / "other"
    other.mkdir()
    run_directory.write_record(other, {"resumed_from": str(newest)})
    assert choose(tmp_path, "other", "auto") == choice.Selection(other, newest, False)
    saved = save(other, 4)
    assert choose(tmp_path, "other", "auto") == choice.Selection(other, saved, True)


def test_a_checkpoint_that_was_copied_belongs_to_no_run(tmp_path: Path) -> None:
    kept = save(tmp_path / "mine", 3).rename(tmp_path / "kept")
    chosen = choose(tmp_path / "runs", None, str(kept))
    assert chosen.directory.parent == tmp_path / "runs"
    assert (chosen.checkpoint, chosen.is_same_run) == (kept, False)


def test_an_existing_run_is_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", save(tmp_path / "other", 1)
    save(mine, 3)
    line = (
        f"{mine}: there is a run already; resume it (--trainer.resume {mine}), choose another "
        "run_name, or replace it (--trainer.overwrite true)"
    )
    assert refused(tmp_path, "mine", None) == [line]
    assert refused(tmp_path, "mine", str(other)) == [line]
    with pytest.raises(errors.ConfigurationError) as raised:
        choice.check_new(choice.Request(tmp_path, "mine"))
    assert raised.value.problems == [line]
    choice.check_new(choice.Request(tmp_path, "mine", "auto"))
    choice.check_new(choice.Request(tmp_path, "mine", overwrite=True))


def test_one_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.csv").touch()
    problem = f"{tmp_path / 'mine'}: there is a run already"
    advice = "choose another run_name, or replace it (--trainer.overwrite true)"
    assert refused(tmp_path, "mine", None) == [f"{problem}; {advice}"]


def test_overwriting_takes_the_directory_and_no_checkpoint(tmp_path: Path) -> None:
    newest, other = save(tmp_path / "mine", 3), save(tmp_path / "other", 1)
    mine = choice.Selection(tmp_path / "mine", overwrites=True)
    assert choose(tmp_path, "mine", None, overwrite=True) == mine
    assert choose(tmp_path, "mine", str(other), overwrite=True) == replace(mine, checkpoint=other)
    assert newest.is_dir()  # until the new run begins
    problem = f"overwrite: {tmp_path / 'mine'} is the run that resume={str(newest)!r} resumes"
    advice = "leave out one of them"
    assert refused(tmp_path, "mine", str(newest), overwrite=True) == [f"{problem}; {advice}"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    newest = save(tmp_path / "mine", 1, 2, 3)
    (newest / "stray.txt").touch()
    flipped = damage(newest.with_name("step-00000002"))
    chosen = choose(tmp_path, "mine", "auto")
    assert chosen.checkpoint == newest.with_name("step-00000001")
    assert chosen.remarks == [
        f"damaged, and not used: {newest}: stray.txt was not written by training; not read",
        f"damaged, and not used: {flipped.parent}: {flipped.name}: its content has changed since "
        "it was saved",
    ]


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    newest = save(tmp_path / "mine", 1, 2)
    damage(newest)
    line = f"{newest}: rank-00000.safetensors: its content has changed since it was saved"
    assert refused(tmp_path, "mine", str(newest)) == [line]
    with pytest.raises(errors.CheckpointError) as raised:
        choice.open_checkpoint(newest)
    before = newest.with_name("step-00000001")
    assert raised.value.problems == [f"{line}; the previous one is {before}"]
    assert choice.open_checkpoint(before).step == 1


def test_a_run_of_damaged_checkpoints_does_not_start_again(tmp_path: Path) -> None:
    newest = save(tmp_path / "mine", 1, 2)
    damage(newest)
    damage(newest.with_name("step-00000001"))
    lines = refused(tmp_path, "mine", "auto")
    begun = [str(newest), str(newest.with_name("step-00000001"))]
    assert [line.split(":")[0] for line in lines[:2]] == begun
    problem = "none of these 2 checkpoints is complete: resume from another one"
    assert lines[2:] == [f"{problem}; see docs/trouble.md#a-damaged-checkpoint"]


def test_one_that_was_set_aside_can_be_taken_up_again(tmp_path: Path) -> None:
    directory = save(tmp_path, 1, 2, 3, 4).parent
    writer.set_aside(directory, directory / "step-00000002")
    save(tmp_path, 3)
    aside = directory / "abandoned-1" / "step-00000003"
    chosen = choose(tmp_path.parent, None, str(aside))
    assert (chosen.directory, chosen.is_same_run) == (tmp_path, True)
    writer.set_aside(directory, aside)
    assert steps(directory) == [3]
    assert steps(directory / "abandoned-1") == [4]
    assert steps(directory / "abandoned-2") == [1, 2, 3]


def test_what_was_just_saved_is_never_pruned(tmp_path: Path) -> None:
    save(tmp_path, 50, 60, 70)
    checkpoints = writer.Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (45, 48, 51):
        checkpoints.save(step, {}, {})
        assert step in steps(tmp_path / "checkpoints")


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("process 1 on another-host\\n")
file.flush()
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_training_in_the_same_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_SECONDS", 0.3)
    save(tmp_path / "mine", 1)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "mine" / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            assert refused(tmp_path, "mine", "auto") == [
                f"{tmp_path / 'mine'}: another training run writes to it (process 1 on "
                "another-host); "
                "wait until it ends, or use another run_name; see "
                "docs/trouble.md#another-run-writes-there"
            ]
        finally:
            other.kill()
    assert choose(tmp_path, "mine", "auto").checkpoint is not None


def test_a_child_that_is_left_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = run_lock.RunLock()
    assert lock.acquire(tmp_path) is None
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        lock.close()
        started = time.monotonic()
        other = run_lock.RunLock()
        assert other.acquire(tmp_path) is None
        assert time.monotonic() - started < run_lock._SECONDS
        other.close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize("how", ["copied", "read"])
def test_code_that_closes_the_file_does_not_release_the_lock(tmp_path, monkeypatch, how):
    monkeypatch.setattr(run_lock, "_SECONDS", 0.3)
    mine, lock = tmp_path / "mine", run_lock.RunLock()
    save(mine, 1)
    lock.acquire(mine)
    shutil.copytree(mine, tmp_path / "copy") if how == "copied" else (mine / ".lock").read_bytes()
    (line,) = refused(tmp_path, "mine", "auto")
    assert f"(process {os.getpid()} on {socket.gethostname()}, attempt 1-" in line
    lock.close()
    assert choose(tmp_path, "mine", "auto").checkpoint is not None
    assert (mine / ".lock").read_text().split()[5].startswith("2-")


def test_what_is_resumed_is_decided_when_the_run_before_has_ended(tmp_path, monkeypatch):
    mine, lock = tmp_path / "mine", run_lock.RunLock()
    save(mine, 1, 2)
    lock.acquire(mine)

    def goes_on_and_ends(_: float) -> None:
        writer.Checkpoints(mine / "checkpoints", keep=2, lock=lock).save(3, {}, {})
        lock.close()

    monkeypatch.setattr(run_lock.time, "sleep", goes_on_and_ends)
    newest = mine / "checkpoints" / "step-00000003"
    assert choose(tmp_path, "mine", "auto") == choice.Selection(mine, newest, True)
    assert steps(newest.parent) == [2, 3]


@pytest.mark.parametrize("how", ["removed", "no locks"])
def test_a_run_that_has_lost_the_lock_writes_nothing_more(tmp_path, monkeypatch, how):
    if how == "no locks":
        monkeypatch.setattr(fcntl, "lockf", without_locks)
        monkeypatch.setattr(fcntl, "fcntl", without_locks)
    root, before = tmp_path / "runs", dict[str, bytes]()

    class Taken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            run = root / "mine"
            if self.global_step == 2:
                if how == "removed":
                    (run / ".lock").unlink()
                run_lock.RunLock().acquire(run)
                # Its own end is another attempt's.
                run_directory.write_record(run, {"of": "another"})
                before.update(content(run))
            return super().training_step(batch, batch_idx)

    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "default_root_dir": root, "run_name": "mine"},
        **{"checkpoint_every_n_steps": 1, "log_every_n_steps": 1, "enable_progress_bar": False},
        **{"record_hashes": False, "max_steps": 4},
    )
    with pytest.raises(errors.TemporaryError) as raised:
        trainer.fit(Taken())
    assert "another training run writes to it now: this one, attempt 1-" in str(raised.value)
    assert reports.exit_code(raised.value) == 75
    assert content(root / "mine") == before
    assert steps(root / "mine" / "checkpoints") == [1, 2]


@pytest.mark.parametrize("more", [{"overwrite": True}, {"resume": "step-00000001"}, {}])
def test_a_restart_goes_on_with_what_its_launch_has_begun(tmp_path, more):
    newest, now = save(tmp_path / "mine", 1, 2), time.time()
    run_directory.write_record(tmp_path / "mine", {})
    same, resume = choice.Selection(newest.parents[1], newest, True), more.pop("resume", None)
    resume = resume and str(newest.with_name(resume))
    assert choose(tmp_path, "mine", resume, launched=now - 60, **more) == same
    if more:  # the run was there when another launch began
        chosen = choose(tmp_path, "mine", None, launched=now + 60, **more)
        assert chosen == choice.Selection(newest.parents[1], overwrites=True)
    assert rank.launched_at() <= time.time()


def without_locks(*_: object) -> None:
    raise OSError(37, "No locks available")


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", without_locks)
    problem = f"{tmp_path}: its file system has no locks (No locks available)"
    reason = "if another training run starts to write to it, this one ends"
    assert run_lock.RunLock().acquire(tmp_path) == f"{problem}: {reason}"
