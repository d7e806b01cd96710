"""The progress line of a run, and the outcome file for the script that has started it."""

import os
import re
from pathlib import Path

import torch
from my_project_trainer.logging import progress
from torch import Tensor, nn

from fitting import Descends, quiet


def test_rate_and_time_left_count_from_the_resumed_step(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = progress.Progress(True, total_steps=1000, samples_per_step=8)
    shown.start(900)
    shown.begin_epoch(0, None)
    now[0] = 110.0
    shown.show(920, {"loss": 0.5})
    # Two steps a second, and 80 of them are left.
    line = "epoch 1  step 920/1000  loss 0.5  16 samples/s  0:00:10  0:00:40 left\n"
    assert capsys.readouterr().err == line


def test_finished_epochs_stay_above_a_bar_that_keeps_its_count(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = progress.Progress(True, total_steps=1000, samples_per_step=8)
    shown.start(0)
    shown.begin_epoch(0, 2)
    shown.show(500, {f"a_long_name_{index}": 0.5 for index in range(4)})
    shown.begin_epoch(1, 2)
    shown.show(1000, {"loss": 0.25})
    shown.stop()
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", capsys.readouterr().err)
    assert "epoch 1/2  step 500/1000  a_long_name_0 0.5" in text
    assert re.search(r" 500/1000 ", text)
    assert re.search(r"epoch 2/2.* 1000/1000 .*loss 0.25.*0:00:0", text)


class Looks(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.existed: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.existed.append(Path(os.environ["TRAINER_OUTCOME"]).exists())
        return (self.weight * batch).sum()


def test_a_fit_removes_the_outcome_of_an_earlier_attempt(tmp_path, monkeypatch):
    told = tmp_path / "outcome"
    told.write_text("failed rank 1: an earlier attempt\n")
    monkeypatch.setenv("TRAINER_OUTCOME", str(told))
    module = Looks()
    quiet(max_epochs=1, default_root_dir=tmp_path).fit(module, [torch.ones(1)])
    assert module.existed == [False]
    assert told.read_text() == "finished step 1\n"
