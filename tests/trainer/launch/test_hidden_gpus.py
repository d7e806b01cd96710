"""A machine has GPUs and torch cannot use them: the line that says why."""

import os
from pathlib import Path

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch import devices, output

HAVE = "this machine has 2 GPUs, which torch cannot use: "


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number in (0, 1):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    output.print_once.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_cpu_build(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    advice = "for CUDA: make setup VARIANT=cuda, or set accelerator='cpu'"
    assert devices.why_hidden() == f"{HAVE}torch {torch.__version__} is a CPU build; {advice}"


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_a_variable_that_hides_them(machine, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    line = devices.why_hidden()
    assert line.startswith(f"{HAVE}CUDA_VISIBLE_DEVICES={value!r} hides them; unset it (in a SLURM")


@pytest.mark.parametrize("value", ["0", "1,0", "GPU-aa11", "MIG-aa11"])
def test_a_variable_that_names_them_is_not_the_cause(machine, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert "CUDA_VISIBLE_DEVICES" not in devices.why_hidden()


def test_a_container_without_them(machine: Path) -> None:
    for path in machine.glob("nvidia*"):
        path.unlink()
    line = devices.why_hidden()
    assert line.startswith(f"{HAVE}there is no {machine}/nvidia0 in this container; start it with ")


def test_no_permission(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    line = devices.why_hidden()
    assert line.startswith(f"{HAVE}{machine}/nvidia0 cannot be opened; in a SLURM job ask for ")


def test_otherwise_torch_is_asked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA unknown error - this may be due to an incorrectly set up\nmore")

    monkeypatch.setattr(torch.cuda, "init", fail)
    line = f"{HAVE}CUDA unknown error - this may be due to an incorrectly set up more, or set "
    line += "accelerator='cpu'"
    assert devices.why_hidden() == line


def test_without_gpus_nothing_is_said(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in [*machine.glob("gpus/*"), machine / "gpus"]:
        path.rmdir()
    assert "2 GPUs" in devices.why_hidden()  # by their devices
    for path in machine.glob("nvidia*"):
        path.unlink()
    assert devices.why_hidden() is None


def test_a_run_that_is_on_the_cpu_for_that_says_so_once(machine, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    trainer.Trainer(max_steps=1, accelerator="cpu")
    assert capsys.readouterr().err == ""
    trainer.Trainer(max_steps=1)
    trainer.Trainer(max_steps=1)
    assert capsys.readouterr().err == f"warning: this run is on the CPU: {devices.why_hidden()}\n"
    with pytest.raises(ConfigurationError) as raised:
        trainer.Trainer(max_steps=1, accelerator="gpu")
    assert raised.value.problems == [f"accelerator='gpu': {devices.why_hidden()}"]


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_says_so(machine, monkeypatch, capsys, rank, lines):
    monkeypatch.setattr(torch.version, "cuda", None)
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    trainer.Trainer(max_steps=1)
    assert capsys.readouterr().err.count("warning: this run is on the CPU: ") == lines
