"""What ``test`` and ``predict`` write: into the run directory, never over something unsaid."""

import json
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer.cli import command as cli
from safetensors.torch import load_file
from tests.project import ROOT

pytestmark = pytest.mark.usefixtures("apart")


def command(name: str, *arguments: str) -> None:
    config = ["--config", str(ROOT / "configs" / "digits.yaml")]
    cli.main([name, *config, "--trainer.accelerator", "cpu", "--trainer.devices", "1", *arguments])


@pytest.fixture
def trained(apart: None, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of three steps with a checkpoint after each but the first; nothing is printed."""
    steps = ("--trainer.max_steps", "3", "--trainer.checkpoint_every_n_steps", "1")
    command("fit", "--trainer.run_name", "mine", "--trainer.loggers", "[]", *steps)
    capsys.readouterr()
    return Path("runs/mine")


def test_results_go_into_the_run_of_the_checkpoint(trained: Path, capsys: Any) -> None:
    command("test", "--checkpoint", str(trained))
    path = trained / "test-step-00000003.json"
    assert capsys.readouterr().out.splitlines()[-1] == f"test results written to {path}"
    results = json.loads(path.read_text())
    assert results["step"] == 3
    assert results["checkpoint"] == "runs/mine/checkpoints/step-00000003"
    assert 0 <= results["metrics"]["test_accuracy"] <= 1
    command("predict", "--checkpoint", str(trained))
    path = trained / "predictions-step-00000003.safetensors"
    assert capsys.readouterr().out.splitlines()[-1] == f"224 predictions written to {path}"
    assert load_file(path)["predictions"].shape == (224,)
    assert [entry.name for entry in Path().iterdir()] == ["runs"]
    assert [entry.name for entry in Path("runs").iterdir()] == ["mine"]


def test_another_checkpoint_has_a_file_of_its_own(trained, capsys, monkeypatch):
    for step in (2, 3, 2):
        command("test", "--checkpoint", str(trained / "checkpoints" / f"step-0000000{step}"))
    said = [line for line in capsys.readouterr().out.splitlines() if "written" in line]
    paths = [trained / f"test-step-0000000{step}.json" for step in (2, 3)]
    assert said == [
        f"test results written to {paths[0]}",
        f"test results written to {paths[1]}",
        f"test results written to {paths[0]} (replaced the earlier ones)",
    ]
    assert [json.loads(path.read_text())["step"] for path in paths] == [2, 3]
    monkeypatch.chdir(trained / "checkpoints")
    for name in ("step-00000003", "../last"):
        command("test", "--checkpoint", name)
        assert f"/{paths[1].name} (replaced" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_random_weights_are_not_scored_unless_they_are_asked_for(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        command(name)
    assert ended.value.code == 2
    assert capsys.readouterr() == (
        "",
        "error: checkpoint: not given; add --checkpoint with a run directory or a checkpoint, or "
        "--checkpoint none for the module's initial weights\n",
    )
    assert not Path("runs").exists()


def refused(capsys: Any, *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--trainer.accelerator", "cpu"])
    assert ended.value.code == 2
    return [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]


def test_a_run_whose_files_are_gone_is_said_to_lack_them(trained: Path, capsys: Any) -> None:
    (trained / "run.json").unlink()
    command("fit", "--trainer.resume", str(trained), "--trainer.max_steps", "4")
    assert "run.json was removed: the new one begins with this" in capsys.readouterr().err
    config, end = trained / "config.yaml", "; name its class in a config file or by --model CLASS"
    config.write_text("trainer: {}\n")
    line = f"model: not given, and {config} names no model{end}"
    assert refused(capsys, "test", "--checkpoint", str(trained)) == [line]
    config.unlink()
    why = "is missing: a script has started the run, or it was removed"
    line = f"model: not given, and {config} {why}{end}"
    assert refused(capsys, "test", "--checkpoint", str(trained)) == [line]
    (trained / "checkpoints").rename("elsewhere")
    line = "runs/mine: no checkpoint there; give a run directory or a checkpoint in it"
    assert refused(capsys, "test", "--checkpoint", str(trained)) == [line]


@pytest.mark.parametrize("content", ["step,epoch,name,value\n" * 20, "", "\0", "x" * 300])
def test_a_file_that_is_no_link_is_no_checkpoint(trained: Path, capsys: Any, content: str) -> None:
    file = trained / "notes.txt"
    file.write_text(content)
    line = f"='{file}': no such directory; give a run directory or a checkpoint"
    assert refused(capsys, "test", "--checkpoint", str(file)) == [f"checkpoint{line}"]
    config = ("--config", str(ROOT / "configs" / "digits.yaml"))
    assert refused(capsys, "fit", *config, "--trainer.resume", str(file)) == [f"resume{line}"]


def test_options_that_a_command_does_not_use_are_named(trained: Path, capsys: Any) -> None:
    words = ("--trainer.max_epochs", "3", "--trainer.callbacks+=[]", "--trainer.seed", "1")
    command("test", "--checkpoint", str(trained), *words)
    assert capsys.readouterr().err == "note: test does not use max_epochs, callbacks\n"


def test_a_checkpoint_in_the_home_directory(trained: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    command("test", "--checkpoint=~/runs/mine")
    path = trained / "test-step-00000003.json"
    assert capsys.readouterr().out.splitlines()[-1] == f"test results written to {path}"


def test_initial_weights_are_tested_in_a_new_run(capsys: Any) -> None:
    command("test", "--trainer.run_name", "untrained", "--checkpoint", "none")
    path = Path("runs/untrained/test.json")
    assert capsys.readouterr().out.splitlines()[-1] == f"test results written to {path}"
    assert json.loads(path.read_text())["checkpoint"] is None


def test_a_checkpoint_outside_a_run_leaves_its_results_in_a_new_one(trained, capsys):
    (trained / "checkpoints" / "step-00000003").rename("kept")
    command("predict", "--checkpoint", "kept", "--trainer.run_name", "other")
    path = Path("runs/other/predictions-kept.safetensors")
    assert capsys.readouterr().out.splitlines()[-1] == f"224 predictions written to {path}"


def test_a_command_without_progress_still_names_its_run_directory(capsys: Any) -> None:
    quiet = ("--trainer.enable_progress_bar", "false", "--trainer.max_steps", "1")
    command("fit", "--trainer.run_name", "quiet", *quiet)
    assert capsys.readouterr() == ("run directory: runs/quiet\n", "")
