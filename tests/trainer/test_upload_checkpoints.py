"""Uploads of checkpoints: what a store contains, resumes of a download, and stores that fail."""

import itertools
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from my_project_trainer import ConfigurationError, Trainer, callbacks, checkpoint
from my_project_trainer.callbacks import BestCheckpoint, UploadCheckpoints, upload_checkpoints
from my_project_trainer.launch import signals
from my_project_trainer.launch.files import write_private

import callback_subject as subject

pytestmark = pytest.mark.usefixtures("apart")
Names = list[str]


class Flaky(LocalFileSystem):  # type: ignore[misc]
    """Fails some of its uploads, and keeps the order of others."""

    protocol = "flaky"
    failing: Iterator[bool] = itertools.repeat(False)
    order: ClassVar[Names] = []

    def put_file(self, source: str, target: str, **options: Any) -> None:
        if next(self.failing):
            raise OSError("the store is away")
        self.order.append(target)
        super().put_file(source, target, **options)

    def pipe_file(self, target: str, *given: Any, **options: Any) -> None:
        self.order.append(target)
        super().pipe_file(target, *given, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


def fit(*given: callbacks.Callback, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        callbacks=list(given),
        **{"max_steps": 6, "checkpoint_every_n_steps": 2, "run_name": "run", **options},
    )
    trainer.fit(subject.Net())
    return trainer


class WritesConfiguration(callbacks.Callback):
    """Writes what the command line writes."""

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        text = "model:\n  token: my-secret\n  b: 1\n"
        write_private(trainer.run_directory / "config.yaml", text)


def files(folder: Path) -> Names:
    """Paths of all files below a folder, without links."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def test_a_store_has_the_checkpoints_and_records_of_the_run(tmp_path: Path) -> None:
    upload = UploadCheckpoints(f"file://{tmp_path}/store", every_n_seconds=0.01)
    fit(BestCheckpoint("val_loss"), upload, keep_checkpoints=2, val_every_n_steps=2)
    run, there = tmp_path / "runs" / "run", tmp_path / "store" / "run"
    (best,) = checkpoint.complete(run / "checkpoints" / "best")
    names = [path.name for path in checkpoint.complete(there / "checkpoints")]
    assert "step-00000006" in names
    assert set(names) <= {"step-00000004", "step-00000006"}
    uploaded = files(there)
    assert {"metrics.csv", "run.json"} <= set(uploaded)
    assert f"checkpoints/best/{best.name}/state.json" in uploaded
    assert not (run / "checkpoints" / ".upload").exists()
    for name in uploaded:
        if name.startswith("checkpoints"):
            assert (there / name).read_bytes() == (run / name).read_bytes()


def test_it_can_be_pickled_for_spawned_ranks() -> None:
    assert pickle.dumps(UploadCheckpoints("memory://store"))


def test_a_download_is_resumed_to_the_same_end(tmp_path: Path) -> None:
    whole = fit(run_name="whole", max_steps=6).run_directory
    fit(UploadCheckpoints("memory://store"), max_steps=4)
    system, path = fsspec.url_to_fs("memory://store/run")
    system.get(path, f"{tmp_path}/elsewhere/", recursive=True)
    fit(resume=f"{tmp_path}/elsewhere/run", default_root_dir=tmp_path / "elsewhere")
    ours, theirs = (
        checkpoint.Checkpoint(checkpoint.resolve(each)).state()["model"]
        for each in (tmp_path / "elsewhere" / "run", whole)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_the_run_no_longer_has_is_removed(tmp_path: Path) -> None:
    upload = UploadCheckpoints(f"file://{tmp_path}/store")
    fit(upload, max_steps=2)
    assert files(tmp_path / "store" / "run" / "checkpoints")[-1] == "step-00000002/state.json"
    fit(upload, max_steps=8, resume="auto")
    left = checkpoint.complete(tmp_path / "store" / "run" / "checkpoints")
    assert [path.name for path in left] == ["step-00000008"]


def test_a_checkpoint_that_is_pruned_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_linked = upload_checkpoints.copy_linked

    def pruned(path: Path, folder: Path) -> Path:
        if path.name == "step-00000006":
            shutil.rmtree(path)
        return copy_linked(path, folder)

    monkeypatch.setattr(upload_checkpoints, "copy_linked", pruned)
    fit(UploadCheckpoints(f"file://{tmp_path}/store", every_n_seconds=600))
    assert capsys.readouterr().err == ""
    assert "metrics.csv" in files(tmp_path / "store" / "run")


def test_an_overwritten_run_is_replaced_there_too(tmp_path: Path) -> None:
    class Fails(callbacks.Callback):
        def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
            raise RuntimeError("planted")

    upload = UploadCheckpoints(f"file://{tmp_path}/store")
    fit(upload, max_steps=2)
    with pytest.raises(RuntimeError, match="planted"):
        fit(upload, Fails(), overwrite=True)
    there = tmp_path / "store" / "run" / "checkpoints"
    assert [path.name for path in checkpoint.complete(there)] == ["step-00000002"]
    fit(upload, max_steps=4, checkpoint_every_n_steps=4, overwrite=True)
    assert [path.name for path in checkpoint.complete(there)] == ["step-00000004"]


def test_checkpoints_of_another_run_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload = UploadCheckpoints(f"file://{tmp_path}/store")
    fit(upload, max_steps=2, default_root_dir=tmp_path / "one")
    before = files(tmp_path / "store")
    fit(upload, max_steps=6, default_root_dir=tmp_path / "two")
    assert files(tmp_path / "store") == before
    error = capsys.readouterr().err
    assert error.count("it has checkpoints of another run; choose another run_name") == 1


def test_a_store_that_fails_is_named_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flaky, "failing", itertools.chain([False, True], itertools.repeat(False)))
    upload = UploadCheckpoints(f"flaky://{tmp_path}/store")
    line = "no upload (OSError: the store is away); training continues"
    for steps in (2, 4):  # each fit has one look, at its end
        fit(upload, max_steps=steps, resume=None if steps == 2 else "auto")
        assert capsys.readouterr().err.count(line) == (steps == 2)
    there = checkpoint.complete(tmp_path / "store" / "run" / "checkpoints")
    assert [path.name for path in there] == ["step-00000004"]


def test_a_store_that_is_away_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flaky, "failing", itertools.repeat(True))
    trainer = fit(UploadCheckpoints(f"flaky://{tmp_path}/store", every_n_seconds=0.01))
    assert trainer.global_step == 6
    assert capsys.readouterr().err.count("training continues") == 1
    assert not checkpoint.complete(tmp_path / "store" / "run" / "checkpoints")


def test_a_failure_is_reported_though_an_upload_never_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(callbacks.Callback):
        def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("planted")

    release = threading.Event()
    monkeypatch.setattr(Flaky, "put_file", lambda *_, **__: release.wait())
    monkeypatch.setattr(upload_checkpoints, "_LAST_SECONDS", 10.0)
    monkeypatch.setattr(upload_checkpoints, "_SECONDS_AFTER_FAILURE", 0.01)
    with pytest.raises(RuntimeError, match="planted"):
        fit(UploadCheckpoints(f"flaky://{tmp_path}/store"), Fails())
    release.set()
    assert "the last upload is not complete after 0.01 s" in capsys.readouterr().err


def test_records_are_uploaded_before_the_checkpoint_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flaky, "order", order := [])
    fit(UploadCheckpoints(f"flaky://{tmp_path}/store"), WritesConfiguration(), max_steps=2)
    ours, theirs = tmp_path / "runs" / "run", tmp_path / "store" / "run"
    last = theirs / "checkpoints" / "step-00000002" / "state.json"
    assert order.index(str(theirs / "metrics.csv")) < order.index(str(last)) == len(order) - 1
    assert (theirs / "config.yaml").read_text() == "model:\n  token: '***'\n  b: 1\n"
    assert "my-secret" in (ours / "config.yaml").read_text()
    assert (theirs / "metrics.csv").read_bytes() == (ours / "metrics.csv").read_bytes()


def test_a_preempted_run_uploads_what_it_has_saved(tmp_path: Path) -> None:
    class Preempt(callbacks.Callback):
        def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(signals.Preempted):
        fit(UploadCheckpoints(f"file://{tmp_path}/store"), Preempt(), max_steps=10**6)
    there = checkpoint.complete(tmp_path / "store" / "run" / "checkpoints")
    here = checkpoint.complete(tmp_path / "runs" / "run" / "checkpoints")
    assert there[-1].name == here[-1].name


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ({"url": "unknown://x"}, ["url='unknown://x': Protocol not known: unknown"]),
        (
            {"url": "unknown://x", "every_n_seconds": 0},
            ["every_n_seconds=0: give", "url='unknown://x': Protocol not known: unknown"],
        ),
        ({"url": "unknown://me:secret@x"}, ["url='unknown://***@x'"]),
        *(
            ({"url": url}, [f"url={url!r}: name a folder, as 's3://bucket/runs' or 'file:///home/"])
            for url in ("", "/", "file://", "file:///", "memory://", "s3:/bucket", "memory:x")
        ),
    ],
)
def test_wrong_arguments_are_refused_in_a_line_each(given: dict[str, Any], lines: Names) -> None:
    with pytest.raises(ConfigurationError) as raised:
        UploadCheckpoints(**given)
    said = str(raised.value).splitlines()
    assert len(said) == len(lines)
    for line, expected in zip(said, lines, strict=True):
        assert line.startswith(f"UploadCheckpoints: {expected}")
