"""Use the model of a run: from the command line without its configuration, and in a script."""

import json
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.callbacks import BestCheckpoint
from my_project_trainer.cli import command as cli
from my_project_trainer.cli import load_module, load_weights
from safetensors.torch import load_file
from tests.project import ROOT

import callback_subject as subject
from fitting import quiet, saved

pytestmark = pytest.mark.usefixtures("apart")
ONE = ("--trainer.accelerator", "cpu", "--trainer.devices", "1")


def command(name: str, *arguments: str) -> None:
    cli.main([name, *ONE, *arguments])


@pytest.fixture
def trained(apart: None, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run with an argument that is not the default, and a best checkpoint before the last."""
    digits = ("--config", str(ROOT / "configs" / "digits.yaml"), "--model.init_args.width", "24")
    steps = ("--trainer.max_steps", "3", "--trainer.val_every_n_steps", "1")
    best = "[{class_path: BestCheckpoint, init_args: {monitor: val_loss, mode: min}}]"
    options = ("--trainer.loggers", "[]", "--trainer.callbacks", best)
    command("fit", *digits, *steps, *options, "--trainer.run_name", "mine")
    capsys.readouterr()
    return Path("runs/mine")


def results(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_checkpoint_needs_no_configuration(trained: Path, capsys: Any) -> None:
    command("test", "--checkpoint", str(trained))
    command("validate", "--checkpoint", "last", "--trainer.run_name", "mine")
    command("validate", "--checkpoint", "best", "--trainer.run_name", "mine")
    command("predict", "--checkpoint", str(trained / "best"))
    assert results(trained / "test-step-00000003.json")["step"] == 3
    name = (trained / "best").resolve().name
    last = results(trained / "validation-step-00000003.json")
    best = results(trained / f"validation-{name}.json")
    assert best["metrics"]["val_loss"] < last["metrics"]["val_loss"]
    assert load_file(trained / f"predictions-{name}.safetensors")
    assert "validation results written to" in capsys.readouterr().out


def test_options_of_the_command_line_replace_those_of_the_run(trained: Path) -> None:
    with pytest.raises(SystemExit):
        command("test", "--checkpoint", str(trained), "--model.init_args.width", "8")
    command("test", "--checkpoint", "none", "--config", str(trained / "config.yaml"))


def test_a_recorded_configuration_starts_a_new_run(trained: Path) -> None:
    recorded = ("fit", "--config", str(trained / "config.yaml"))
    command(*recorded, "--trainer.resume", "auto", "--trainer.run_name", "other")
    command("fit", "--config", "runs/other/config.yaml")
    [new] = set(Path("runs").iterdir()) - {trained, Path("runs/other")}
    assert (new / "config.yaml").read_text() == (trained / "config.yaml").read_text()
    assert json.loads((new / "run.json").read_text())["attempts"][0]["resumed_from"] is None


def test_links_follow_the_checkpoints(trained: Path) -> None:
    assert (trained / "last").resolve().name == "step-00000003"
    assert (trained / "best").resolve().name < "step-00000003"
    command("fit", "--config", str(trained / "config.yaml"), "--trainer.max_steps", "4",
            "--trainer.resume", str(trained))  # fmt: skip
    assert (trained / "last").resolve().name == "step-00000004"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("best",), "checkpoint=best: of which run? Add --trainer.run_name RUN, or give "),
        (("best", "--trainer.run_name", "none"), "runs/none/best: no checkpoint there"),
    ],
)
def test_names_without_a_run_are_refused(arguments, line, capsys):
    digits = str(ROOT / "configs" / "digits.yaml")
    with pytest.raises(SystemExit) as ended:
        command("test", "--config", digits, "--checkpoint", *arguments)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


def test_a_script_loads_the_model_of_a_run(trained: Path) -> None:
    module = load_module(trained)
    assert not module.training
    state, weights = module.state_dict(), saved(trained)
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    best = load_module(trained / "best").state_dict()
    assert any(not torch.equal(best[name], weights[name]) for name in weights)


def test_the_model_of_a_script_takes_weights_only(tmp_path: Path) -> None:
    fit = quiet(max_epochs=3, run_name="run", callbacks=[BestCheckpoint("val_loss", "max")])
    module = subject.Net()
    fit.fit(module)
    again = subject.Net()
    load_weights(again, "runs/run")
    assert torch.equal(again.layer.weight, module.layer.weight)
    with pytest.raises(trainer.ConfigurationError, match="is missing: a script has started"):
        load_module("runs/run")
    with pytest.raises(trainer.CheckpointError, match="does not fit Linear") as caught:
        load_weights(torch.nn.Linear(2, 2), "runs/run")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 1
    last = fit.validate(subject.Net(), checkpoint="last")["val_loss"]
    assert last == pytest.approx(fit.validate(module)["val_loss"])
    assert fit.validate(subject.Net(), checkpoint="best")["val_loss"] > last


def test_names_of_checkpoints_need_a_fit() -> None:
    fit = trainer.Trainer(accelerator="cpu", devices=1, max_steps=1, enable_progress_bar=False)
    with pytest.raises(trainer.ConfigurationError, match="checkpoint='best': nothing was trained"):
        fit.validate(subject.Net(), checkpoint="best")
    fit.fit(subject.Net())
    line = "the run kept none; train with the callback BestCheckpoint, or use 'last'"
    with pytest.raises(trainer.ConfigurationError, match=line):
        fit.validate(subject.Net(), checkpoint="best")
