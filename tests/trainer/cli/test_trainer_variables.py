"""Variables of the trainer that are misspelled or have wrong values."""

import os
import re
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.cli import command as cli
from my_project_trainer.launch import output
from my_project_trainer.run import environment
from test_bad_inputs import RIGHT, SOURCES
from tests.project import PACKAGE, run

import bad_inputs
from fitting import quiet

pytestmark = pytest.mark.usefixtures("nothing_runs")


def test_every_variable_of_the_trainer_is_known() -> None:
    text = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    assert set(re.findall(r"\bTRAINER_[A-Z_]*[A-Z]\b", text)) == environment.KNOWN


def test_a_misspelt_variable_is_named_once(capsys, monkeypatch):
    output.print_once.cache_clear()
    monkeypatch.setenv("TRAINER_CLUSTR", "none")
    for _ in range(2):
        trainer.Trainer(max_epochs=1)
    (line,) = capsys.readouterr().err.splitlines()
    advice = "did you mean 'TRAINER_CLUSTER'"
    assert line.startswith(f"warning: TRAINER_CLUSTR is not a variable of the trainer; {advice}")


@pytest.mark.parametrize("is_whole", [True, False], ids=["a rank's variables", "the directory"])
def test_what_a_rank_has_set_silences_no_command_that_it_starts(
    is_whole: bool, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = bad_inputs.INHERITED if is_whole else {}
    for name, value in {**rank, "TRAINER_FAILURE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", *RIGHT[2:], "--model", "nowhere.Nope"])
    assert ended.value.code == 2
    *notes, last = capfd.readouterr().err.splitlines()
    assert last == "error: model.class_path='nowhere.Nope': No module named 'nowhere'"
    advice = "that run's launch variables are ignored"
    note = f"note: rank 1 of another run has started this process; {advice}"
    assert notes == [note] * is_whole
    assert list(tmp_path.iterdir()) == []


class Doubles(trainer.TrainingModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0] * 2


@pytest.mark.parametrize("parent", [{}, {"TRAINER_PARENT_PID": "1"}], ids=["alone", "parent"])
def test_a_directory_for_failures_without_a_rank_is_ignored(parent, tmp_path, monkeypatch):
    for name, value in {**parent, "TRAINER_FAILURE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert quiet().predict(Doubles(), [[torch.ones(1)]])[0].tolist() == [2]
    assert list(tmp_path.iterdir()) == []


_NESTED = f"""
import os, subprocess, sys
from {PACKAGE}_trainer import Trainer
Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1)
layout = "from {PACKAGE}_trainer import Trainer; t = Trainer(accelerator='cpu', max_steps=1)\\n"
layout += "print(t.world_size, t.global_rank)"
print(subprocess.run([sys.executable, "-c", layout], capture_output=True, text=True).stdout, end="")
"""


@pytest.mark.slow
def test_a_script_that_a_rank_starts_is_alone(tmp_path: Path) -> None:
    rank = {
        **bad_inputs.INHERITED,
        "TRAINER_FAILURE_DIR": str(tmp_path),
        "TRAINER_PARENT_PID": str(os.getpid()),
        "TRAINER_RANK_PID": "",
    }
    done = run(["-c", _NESTED], extra=rank, fresh=True)
    assert done.stdout == "1 0\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_LOGS", "nonsense"),
        ("TORCH_DISTRIBUTED_DEBUG", "loud"),
        ("TORCH_LOGS_OUT", "/gone/log"),
    ],
)
def test_a_variable_that_torch_refuses_is_one_line(name: str, value: str) -> None:
    done = run(["-m", PACKAGE, "fit"], extra={name: value}, fresh=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {name}={value!r}: ")
    assert line.endswith("; unset it, or correct it")
