"""The command ``export``: each file is loaded back and compared; what cannot be is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import TrainingModule
from my_project_trainer.checkpoint import Checkpoints, resolve
from my_project_trainer.cli import command as cli
from my_project_trainer.cli import load_module
from safetensors import safe_open
from safetensors.torch import load_file
from tests.conformance.rows import ROUNDING
from tests.project import fit, succeed
from torch import Tensor, nn

from my_project.tasks.gan import GAN
from my_project.tasks.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("apart")
STEPS = ("--trainer.max_steps", "2", "--trainer.loggers", "[]", "--trainer.sanity_check", "0")
EMA = "[{class_path: EMA, init_args: {decay: 0.5}}]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of two runs with the same global batches: on one process, and sharded on two."""
    folder = tmp_path_factory.mktemp("trained")
    for name, strategy, devices in (("one", "single_device", "1"), ("sharded", "fsdp", "2")):
        how = ("--trainer.strategy", strategy, "--trainer.devices", devices, *STEPS)
        where = ("--trainer.run_name", name, "--trainer.default_root_dir", folder)
        words = fit("--trainer.accelerator", "cpu", "--trainer.callbacks", EMA, *how, *where)
        if devices == "1":
            cli.main([*map(str, words[2:]), "--model.dropout", "0"])
        else:
            succeed([*words, "--model.dropout", "0"])
    return folder


@pytest.fixture
def runs(trained: Path) -> Path:
    shutil.copytree(trained, "runs", symlinks=True)
    return Path("runs")


def export(*arguments: str | Path) -> None:
    cli.main(["export", *map(str, arguments)])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    """The lines with which a command ends; it writes nothing."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        export(*arguments)
    assert ended.value.code == 2
    assert sorted(Path().rglob("*")) == before
    out, error = capsys.readouterr()
    assert out == ""
    return [line.removeprefix("error: ") for line in error.splitlines()]


def metadata(file: Path | str) -> Any:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


CLASS = "my_project.tasks.image_classifier.ImageClassifier"


def test_weights_are_those_of_the_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(runs / "one", "--format", "safetensors")
    file = runs / "one" / "exported-step-00000002.safetensors"
    assert capsys.readouterr().out == f"step 2 exported to {file}\n"
    exported, expected = load_file(file), load_module(runs / "one").state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert metadata(file) == {"format": "pt", "class_path": CLASS, "step": "2"}
    capsys.readouterr()

    [line] = refused(capsys, runs / "one" / "last", "--format", "safetensors")
    assert line.endswith(f"{file}: exists; add --overwrite, or give --output FILE")
    file.write_text("")
    export(runs / "one", "--format", "safetensors", "--overwrite")
    assert load_file(file).keys() == expected.keys()
    assert not list(file.parent.glob(".exported*"))


def test_weights_of_a_sharded_run_are_whole(runs: Path) -> None:
    assert len(list(resolve(runs / "sharded").glob("rank-*.safetensors"))) == 2
    export(runs / "sharded", "--format", "safetensors", "--output", "sharded.safetensors")
    exported, expected = load_file("sharded.safetensors"), load_module(runs / "one").state_dict()
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(exported[name], value, atol=ROUNDING, rtol=0)


def test_the_weights_of_training_instead_of_their_average(runs: Path, capsys: Any) -> None:
    for averaged in (True, False):
        how = ("--averaged", str(averaged).lower())
        export(runs / "one", "--format", "safetensors", "--output", f"{averaged}.safetensors", *how)
        module = load_module(runs / "one", averaged=averaged)
        said = "weights: the average of EMA, which validations of the fit used; "
        assert capsys.readouterr().err.count(said) == (2 if averaged else 0)
        for key, value in module.state_dict().items():
            assert torch.equal(load_file(f"{averaged}.safetensors")[key], value)
        words = ["--checkpoint", str(runs / "one"), "--trainer.accelerator", "cpu", *how]
        cli.main(["test", *words, "--trainer.devices", "1"])
        assert (said in capsys.readouterr().err) is averaged
    average, trained = load_file("True.safetensors"), load_file("False.safetensors")
    assert not any(torch.equal(trained[key], value) for key, value in average.items())


def test_a_program_computes_what_the_module_does(runs: Path) -> None:
    export(runs / "one", "--format", "torch_export")
    extra = {"class_path": "", "step": ""}
    file = runs / "one" / "exported-step-00000002.pt2"
    program, module = torch.export.load(file, extra_files=extra).module(), load_module(runs / "one")
    assert extra == {"class_path": CLASS, "step": "2"}
    for size in (1, 2, 7):  # dropout is off
        images = torch.rand(size, 1, 8, 8)
        assert torch.equal(program(images), module(images))


class Model(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


class Two(Model):
    example_input_array: Any = (torch.zeros(1, 3), torch.zeros(1, 1))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * factor
        return result


class ByName(Two):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = {"factor": torch.zeros(1, 1), "x": torch.zeros(1, 3)}


class NoExample(Two):
    example_input_array = None


class OddExample(Two):
    """Has inputs without a common batch dimension."""

    example_input_array = (torch.zeros(4, 3), torch.zeros(()))


class Unequal(Two):
    """Has inputs of several batch sizes."""

    example_input_array = (torch.zeros(4, 3), torch.zeros(5, 1))


class Fixed(Two):
    """Is written for one batch size."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x.reshape(2, 3) * factor


class Depends(Two):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x if factor.sum() > 0 else -x


class Fails(Two):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        raise ValueError("no forward\ntoday")


class Extra(Two):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"words": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def save(cls: type[TrainingModule]) -> tuple[Any, Path]:
    """Create a run without a fit, with a checkpoint of a new module."""
    module, directory = cls(), Path("runs/made")
    Checkpoints(directory / "checkpoints").save(1, {"model": module.state_dict()}, {})
    section = f"model: {{class_path: {cls.__module__}.{cls.__qualname__}}}\n"
    (directory / "config.yaml").write_text(section)
    return module.eval(), directory


@pytest.mark.parametrize("cls", [Two, ByName])
def test_several_inputs(cls: type[Model]) -> None:
    module, directory = save(cls)
    export(directory, "--format", "torch_export", "--output", "model.pt2")
    program: Any = torch.export.load("model.pt2").module()
    x, factor = torch.rand(5, 3), torch.rand(5, 1)
    result = program(x=x, factor=factor) if cls is ByName else program(x, factor)
    assert torch.equal(result, module(x, factor))


@pytest.mark.parametrize("cls", [LanguageModel, GAN])
def test_the_examples(cls: type[TrainingModule]) -> None:
    module, directory = save(cls)
    export(directory, "--format", "torch_export")
    [file] = directory.glob("exported*")
    example: Any = module.example_input_array
    inputs = torch.randint(0, 100, (3, *example.shape[1:])).to(example.dtype)
    program: Any = torch.export.load(file).module()
    torch.testing.assert_close(program(inputs), module(inputs), atol=ROUNDING, rtol=0)


INPUTS = "give a tensor, a tuple of tensors, or a dict of them by argument of forward, all with "


@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (Model, "Model has no forward to export: define it, or use --format safetensors"),
        (NoExample, "NoExample.example_input_array is not defined: in __init__, set it to inputs"),
        (OddExample, f"OddExample.example_input_array: {INPUTS}the batch as first dimension"),
        (Unequal, f"Unequal.example_input_array: {INPUTS}the batch as first dimension"),
        (Fixed, "Fixed.forward: torch.export cannot trace it for batches of any size ("),
        (Depends, "Depends.forward: torch.export cannot trace it for batches of any size (Could"),
        (Fails, "Fails.forward: torch.export cannot trace it for batches of any size (no forward"),
    ],
)
def test_a_module_that_cannot_be_exported(cls: type[Model], line: str, capsys: Any) -> None:
    _, directory = save(cls)
    lines = refused(capsys, directory, "--format", "torch_export")
    assert [text for text in lines if text.startswith(line)] == lines[-1:]
    export(directory, "--format", "safetensors")


def test_a_state_that_is_no_tensor(capsys: Any) -> None:
    _, directory = save(Extra)
    [line] = refused(capsys, directory, "--format", "safetensors")
    assert "_extra_state is a dict; safetensors files contain only tensors" in line


def test_weights_of_a_script_s_run_need_no_class(capsys: Any) -> None:
    module, directory = save(Two)
    (directory / "config.yaml").unlink()
    export(directory, "--format", "safetensors")
    [file] = directory.glob("exported*")
    assert torch.equal(load_file(file)["layer.weight"], module.layer.weight)
    assert metadata(file) == {"format": "pt", "step": "1"}
    capsys.readouterr()
    [line] = refused(capsys, directory, "--format", "torch_export")
    assert "config.yaml is missing: a script has started the run, or it was removed; create" in line


WEIGHTS = "--format safetensors"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("runs/made", ["export: the following arguments are required: --format"]),
        (f"{WEIGHTS}", ["export: the following arguments are required: RUN"]),
        ("runs/made --format tflite", ["'tflite' (choose from "]),
        (f"runs/made {WEIGHTS} --checkpoint best", ["--checkpoint best"]),
        (f"best {WEIGHTS}", ["RUN='best': no such directory; give a run directory or a checkp"]),
        (f"runs {WEIGHTS}", ["runs: no checkpoint there; give a run directory"]),
        (
            "runs/none --format torch_export --output x.onnx",
            ["RUN='runs/none': no such directory", "writes .pt2 files; name it x.pt2"],
        ),
        (
            f"runs/made {WEIGHTS} --output none/x.safetensors",
            ["none/x.safetensors: none is not a directory that can be written to"],
        ),
        (
            f"runs/made {WEIGHTS} --output made.safetensors --overwrite",
            ["made.safetensors: exists; name another file"],
        ),
        (f"runs/made {WEIGHTS} --output $NO/x.safetensors", ["the variable NO is not set"]),
    ],
)
def test_arguments_are_refused_together(arguments: str, lines: list[str], capsys: Any) -> None:
    save(Two)
    Path("made.safetensors").mkdir()
    messages = refused(capsys, *arguments.split())
    assert len(messages) == len(lines), messages
    assert all(text in line for text, line in zip(lines, messages, strict=True)), messages


def test_a_damaged_checkpoint_is_not_exported(capsys: Any) -> None:
    _, directory = save(Two)
    file = resolve(directory) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    [line] = refused(capsys, directory, "--format", "safetensors")
    assert "rank-00000.safetensors: its content has changed since it was saved" in line


def test_the_help_names_the_formats(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        export("--help")
    assert ended.value.code == 0
    assert "safetensors: the weights by name" in " ".join(capsys.readouterr().out.split())
    cli.main([])
    assert "export RUN --format NAME" in capsys.readouterr().out
