"""Linear layers in float8 by torchao, which emulates it on a CPU."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import ConfigurationError, Trainer, UserError
from my_project_trainer.checkpoint import reading
from my_project_trainer.loop import float8
from tests.project import run
from torch import Tensor, nn

from float8_subject import WIDTH, Net, fit

pytestmark = [pytest.mark.needs("torchao"), pytest.mark.usefixtures("apart")]
BLOCKS = {"float8": ["Block"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Net]:
    """What one process trains, without float8 and with it."""
    folder, nets = tmp_path_factory.mktemp("alone"), {"without": Net(), "with": Net()}
    for name, net in nets.items():
        fit(folder, name, BLOCKS if name == "with" else {}, net)
    return nets


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)  # the same names
    return max(float((each - other[name]).abs().max()) for name, each in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_compute_what_one_process_computes(
    alone: dict[str, Net], tmp_path: Path, strategy: str
) -> None:
    options = {"strategy_options": {"unit_classes": ["Block"]}} if strategy == "fsdp" else {}
    case = json.dumps({**BLOCKS, "devices": 2, "strategy": strategy, **options})
    done = run(["-m", "float8_subject", tmp_path, case])
    assert done.returncode == 0, done.stderr
    line = "note: float8: 4 linear layers, emulated, which is slow"
    assert done.stderr.splitlines().count(line) == 1
    saved = reading.Checkpoint(reading.resolve(tmp_path / "run")).state()["model"]
    assert all(each.dtype == torch.float32 for each in saved.values())
    # Scales are those of a rank's own samples, so roundings differ.
    one, changed = (alone[name].state_dict() for name in ("with", "without"))
    assert 0 < difference(saved, one) < difference(one, changed)


def test_products_are_rounded_a_little(alone: dict[str, Net]) -> None:
    ours, theirs = alone["with"].losses, alone["without"].losses
    assert ours[0] != theirs[0]
    assert ours == pytest.approx(theirs, abs=0.05)


def test_the_model_is_as_before_and_its_checkpoint_resumes_without(tmp_path: Path) -> None:
    module, seen = Net(), set()
    module.blocks[0].up.register_forward_hook(lambda layer, args, y: seen.add(id(layer)))
    before = {name: type(each) for name, each in module.named_modules()}
    first = fit(tmp_path, "run", BLOCKS, module)
    assert {name: type(each) for name, each in module.named_modules()} == before
    assert not any("forward" in vars(each) for each in module.modules())
    assert seen == {id(module.blocks[0].up)}  # hooks are called
    resumed = fit(tmp_path, "more", {"resume": str(first.run_directory), "max_steps": 3}, Net())
    assert resumed.global_step == 3


@pytest.mark.slow
@pytest.mark.needs("g++")
def test_it_is_compiled(tmp_path: Path) -> None:
    eager, compiled = Net(), Net()
    fit(tmp_path, "eager", BLOCKS, eager)
    fit(tmp_path, "compiled", {**BLOCKS, "compile": {"regional": ["Block"]}}, compiled)
    assert compiled.losses == pytest.approx(eager.losses, abs=0.01)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "32-true"}, "float8 with precision='32-true': torchao tests it in bfloat16"),
        ({"strategy": "tensor_parallel"}, "strategy='tensor_parallel' does not support float8"),
        ({"float8": "Block"}, "float8='Block': give a list of names"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], line: str) -> None:
    given = {**BLOCKS, "accelerator": "cpu", "precision": "bf16-mixed", "max_steps": 1, **options}
    with pytest.raises(ConfigurationError) as raised:
        Trainer(**given)
    assert [each for each in raised.value.problems if each.startswith(line)]


def test_without_torchao_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="not installed: pip install torchao"):
        Trainer(**BLOCKS, accelerator="cpu", devices=1, precision="bf16-mixed", max_steps=1)


def test_layers_without_fitting_sizes_are_left_out() -> None:
    module = Net()
    assert float8.select(module, ["head", "blocks.*"]) == [
        each for block in module.blocks for each in (block.up, block.down)
    ]
    with pytest.raises(ConfigurationError, match=r"no nn.Linear .* multiples of 16"):
        float8.select(module, ["head"])


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with (
        pytest.raises(UserError, match=r"A GPU has none: it needs compute capability 8\.9"),
        float8.applied(module, ["0"], torch.device("cuda")),
    ):
        pass
