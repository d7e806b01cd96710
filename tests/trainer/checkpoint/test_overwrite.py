"""A run that is overwritten is kept until the new run has saved a checkpoint."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.callbacks import EarlyStopping
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.errors import ConfigurationError
from test_lineage import Model, content, steps, train
from tests.project import run
from torch import Tensor
from torch.utils.data import DataLoader

from fitting import quiet

pytestmark = pytest.mark.timeout(600)


class Fails(Model):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "step" or (self.how == "rank" and self.global_rank == 1):
            raise RuntimeError("planted")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.how == "nan" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.how == "sanity":
            raise RuntimeError("planted")
        self.log("val_loss", torch.tensor(1.0))

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def overwrite(root: Path, how: str = "", **options: Any) -> None:
    shared = {"max_steps": 2, "sanity_check": 1, "default_root_dir": root, "run_name": "run"}
    quiet(**shared | {"overwrite": True} | options).fit(Fails(how))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of runs with one run of two steps."""
    train(tmp_path, max_steps=2)
    return tmp_path


def relative(run: Path) -> dict[str, bytes]:
    files = {str(Path(name).relative_to(run)): digest for name, (digest, _) in content(run).items()}
    return {name: digest for name, digest in files.items() if not name.startswith("overwritten")}


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("sanity", {}),
        ("step", {}),
        ("nan", {}),
        ("", {"callbacks": [EarlyStopping("unknown")], "check_val_every_n_epoch": 1}),
    ],
)
def test_a_run_that_fails_before_it_saves_loses_nothing(root, capsys, how, options):
    before, run = relative(root / "run"), root / "run"
    if "callbacks" in options:  # else the epoch's checkpoint is there before its validation
        options |= {"val_every_n_steps": 1, "max_steps": 4}
    for _ in range(2):  # the second attempt does not replace what the first one kept
        capsys.readouterr()
        with pytest.raises(Exception, match=r"planted|NaN|unknown"):
            overwrite(root, how, **options)
        note = f"note: the run that was there is in {run}/overwritten until a checkpoint is saved"
        told = capsys.readouterr().err.splitlines()
        assert told.count(note) == 2  # at the start, and after the failure
        assert relative(run / "overwritten") == before
    with pytest.raises(ConfigurationError, match=rf"--trainer.resume {run}/overwritten\)"):
        train(root)
    train(root, None, resume=str(run / "overwritten"), max_steps=3)
    assert steps(run / "overwritten" / "checkpoints") == [1, 2, 3]


def test_it_is_removed_when_the_new_run_has_saved(root: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        overwrite(root, "step")
    overwrite(root)
    assert steps(root / "run" / "checkpoints") == [2]
    assert not (root / "run" / "overwritten").exists()


COMMAND = """
import sys
from pathlib import Path
import test_overwrite
test_overwrite.overwrite(Path(sys.argv[1]), sys.argv[2], devices=int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("how", "processes"), [("kill", 1), pytest.param("rank", 2, marks=pytest.mark.slow)]
)
def test_a_process_that_ends_at_once_loses_nothing(root, tmp_path, how, processes):
    before = relative(root / "run")
    script = tmp_path / "script.py"
    script.write_text(COMMAND)
    done = run([script, root, how, str(processes)], cwd=tmp_path)
    assert done.returncode not in (0, 2), done.stderr
    assert "note: the run that was there is in run/overwritten until" in done.stderr
    assert relative(root / "run" / "overwritten") == before
    overwrite(root)
    assert not (root / "run" / "overwritten").exists()


def test_a_kill_while_the_run_is_set_aside_loses_nothing(root: Path) -> None:
    before, run = relative(root / "run"), root / "run"
    (run / ".overwritten").mkdir()
    (run / "checkpoints").rename(run / ".overwritten" / "checkpoints")
    run_directory.keep_overwritten(run)
    assert relative(run / "overwritten") == before
    assert relative(run) == {}


def test_a_first_attempt_that_saved_nothing_stays_in_the_record(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        overwrite(tmp_path, "step", overwrite=False, resume="auto")
    overwrite(tmp_path, overwrite=False, resume="auto")
    attempts = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert [attempt["ended"] for attempt in attempts] == ["failed RuntimeError", "finished step 2"]
