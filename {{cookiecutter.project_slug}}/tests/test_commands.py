"""A smoke test of each command: what users type, on the digits, in this process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from my_project_trainer.cli import command as cli
from my_project_trainer.cli import load_module

from .project import ROOT, fit, succeed

CPU = ("--trainer.accelerator", "cpu", "--trainer.devices", "1")


def command(name: str, *arguments: str | Path) -> None:
    config = ("--config", ROOT / "configs" / "digits.yaml")
    cli.main([name, *map(str, (*config, *CPU, *arguments))])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    where = ("--trainer.default_root_dir", folder, "--trainer.run_name", "digits")
    command("fit", "--trainer.max_epochs", "3", "--trainer.loggers", "[csv]", *where)
    return folder / "digits"


def test_every_command_is_tested_here() -> None:
    assert set(cli.HELP) == {
        *("fit", "validate", "test", "predict", "find_batch_size", "find_learning_rate"),
        "export",
    }


def test_fit(trained: Path) -> None:
    (attempt,) = json.loads((trained / "run.json").read_text())["attempts"]
    assert attempt["layout"]["world_size"] == 1
    rows = [line.split(",") for line in (trained / "metrics.csv").read_text().splitlines()[1:]]
    accuracies = [float(value) for _, _, name, value in rows if name == "val_accuracy"]
    assert len(accuracies) == 3
    assert accuracies[-1] > 0.7


def test_fit_on_two_processes(tmp_path: Path) -> None:
    options = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.max_steps", "2")
    where = ("--trainer.default_root_dir", tmp_path, "--trainer.run_name", "two")
    succeed(fit(*options, *where))
    (attempt,) = json.loads((tmp_path / "two" / "run.json").read_text())["attempts"]
    assert attempt["layout"]["world_size"] == 2


def test_validate(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("validate", "--checkpoint", trained)
    assert "val_accuracy: " in capsys.readouterr().out


def test_test(trained: Path) -> None:
    command("test", "--checkpoint", trained)
    (path,) = trained.glob("test-step-*.json")
    results: dict[str, Any] = json.loads(path.read_text())
    assert results["metrics"]["test_accuracy"] > 0.7


def test_predict(trained: Path) -> None:
    command("predict", "--checkpoint", trained)
    (path,) = trained.glob("predictions-step-*.safetensors")
    predicted = load_file(path)["predictions"]
    assert predicted.shape == (224,)
    assert set(predicted.tolist()) <= set(range(10))


def test_export(trained: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "weights.safetensors")
    cli.main(["export", str(trained), "--format", "safetensors", "--output", output])
    weights, expected = load_file(output), load_module(trained).state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_find_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("find_batch_size", "--trainer.default_root_dir", tmp_path)
    assert "1349" in capsys.readouterr().out  # CPUs have memory for the whole data set
    assert list(tmp_path.iterdir()) == []


def test_find_learning_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--trainer.default_root_dir", tmp_path, "--trainer.run_name", "rates")
    command("find_learning_rate", *where)
    line = r"the loss falls most steeply at the learning rate (\S+)\n"
    match = re.search(line, capsys.readouterr().out)
    assert match is not None
    assert 1e-4 < float(match[1]) < 1
    assert (tmp_path / "rates" / "learning_rates.csv").read_text().startswith("lr,loss,")


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command("fit", "--trainer.max_epoch", "3")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean" in line
    assert "max_epochs" in line
