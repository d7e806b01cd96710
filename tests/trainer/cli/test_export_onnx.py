"""The command ``export --format onnx``: ONNX Runtime computes what the module computes."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import TrainingModule
from my_project_trainer.cli import load_module
from test_export import CLASS, EMA, ByName, Depends, export, refused, save
from tests.conformance.rows import ROUNDING
from tests.project import fit, succeed
from torch import Tensor

from my_project.tasks.gan import GAN
from my_project.tasks.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("apart")
needs_onnx = pytest.mark.needs("onnx")
FORMAT = ("--format", "onnx")


def opened(file: Path | str) -> Any:
    runtime = importlib.import_module("onnxruntime")
    return runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def computed(file: Path | str, *inputs: Tensor) -> Tensor:
    session = opened(file)
    names = [entry.name for entry in session.get_inputs()]
    named = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    [result] = session.run(None, named)
    return torch.from_numpy(result)


class NotInOnnx(ByName):
    """Uses an operator that ONNX does not have."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return torch.special.bessel_j0(self.layer(x)) * factor


@needs_onnx
def test_a_sharded_run_with_and_without_its_average(tmp_path: Path, capsys: Any) -> None:
    how = ("--trainer.strategy", "fsdp", "--trainer.devices", "2", "--trainer.max_steps", "2")
    where = ("--trainer.run_name", "run", "--trainer.default_root_dir", tmp_path / "runs")
    words = fit("--trainer.accelerator", "cpu", "--trainer.callbacks", EMA, *how, *where)
    succeed([*words, "--trainer.loggers", "[]"])
    folder = tmp_path / "runs" / "run"

    export(*FORMAT, folder)
    file = folder / "exported-step-00000002.onnx"
    assert capsys.readouterr().out.startswith(f"step 2 exported to {file.relative_to(tmp_path)}")
    export(*FORMAT, folder, "--output", "trained.onnx", "--averaged", "false")
    assert capsys.readouterr().err == ""
    results = []
    for averaged, written in ((True, file), (False, "trained.onnx")):
        extra = opened(written).get_modelmeta().custom_metadata_map
        assert extra == {"class_path": CLASS, "step": "2"}
        module = load_module(folder, averaged=averaged)
        for size in (1, 2, 7):  # dropout is off
            images = torch.rand(size, 1, 8, 8)
            outputs = computed(written, images)
            torch.testing.assert_close(outputs, module(images), atol=ROUNDING, rtol=0)
        results.append(computed(written, torch.ones(1, 1, 8, 8)))
    assert not torch.allclose(*results, atol=1e-6, rtol=0)


@needs_onnx
@pytest.mark.parametrize("cls", [LanguageModel, GAN])
def test_the_examples(cls: type[TrainingModule]) -> None:
    module, directory = save(cls)
    export(*FORMAT, directory, "--output", "model.onnx")
    example: Any = module.example_input_array
    inputs = torch.randint(0, 100, (3, *example.shape[1:])).to(example.dtype)
    torch.testing.assert_close(computed("model.onnx", inputs), module(inputs), atol=1e-5, rtol=0)


@needs_onnx
def test_arguments_by_name() -> None:
    module, directory = save(ByName)
    export(*FORMAT, directory, "--output", "model.onnx")
    session = opened("model.onnx")
    assert {entry.name for entry in session.get_inputs()} == {"x", "factor"}
    x, factor = torch.rand(5, 3), torch.rand(5, 1)
    [result] = session.run(None, {"x": x.numpy(), "factor": factor.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), module(x, factor), atol=ROUNDING, rtol=0)


@needs_onnx
@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (Depends, "Depends.forward: torch.export cannot trace it for batches of any size (Could"),
        (NotInOnnx, "NotInOnnx.forward: cannot be written as ONNX ("),
    ],
)
def test_a_module_that_cannot_be_exported(cls: Any, line: str, capsys: Any) -> None:
    _, directory = save(cls)
    message = refused(capsys, directory, *FORMAT)[-1]
    assert message.startswith(line), message


@needs_onnx
def test_weights_that_no_file_holds(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _, directory = save(ByName)
    monkeypatch.setattr("my_project_trainer.cli.export._ONNX_BYTES", 32)  # it has 8 numbers
    line = refused(capsys, directory, *FORMAT)[-1]
    assert "GiB of weights, and an ONNX file holds less than 2: use --format torch_export" in line


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _, directory = save(ByName)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    line = "--format onnx needs onnx and onnxscript: make onnx, or pip install '.[onnx]'"
    assert refused(capsys, directory, *FORMAT)[-1] == line
