"""Models that are built without memory."""

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import UserError
from my_project_trainer.memory import meta_device
from my_project_trainer.module import TrainerState
from tests.project import fit, run
from torch import nn

from my_project.tasks import language_model
from sharding_subject import Tied


class Run:
    """What materialize asks of a run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed


def materialized(make: type, seed: int = 0, **arguments: object) -> nn.Module:
    """A module that was built without memory, whole."""
    with meta_device.building():
        module = make(**arguments)
    module.trainer_state = TrainerState(run=Run(seed))
    meta_device.materialize(module, module)
    return module


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    one = materialized(Tied)
    torch.rand(3)
    state = torch.get_rng_state()
    other, third = materialized(Tied), materialized(Tied, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in one.named_parameters():
        assert torch.equal(value, other.get_parameter(name))
    assert not torch.equal(one.blocks[0].up.weight, third.blocks[0].up.weight)
    assert not torch.equal(one.blocks[0].up.weight, one.blocks[1].up.weight)


def test_a_parameter_that_is_used_twice_stays_one():
    module = materialized(Tied)
    assert module.head.weight is module.tokens.weight
    assert not any(each.is_meta for each in module.parameters())
    assert not Tied().head.weight.is_meta


def test_pieces_have_the_values_of_the_whole():
    with meta_device.building():
        module = Tied()
    module.trainer_state = TrainerState(run=Run(0))
    meta_device.materialize(module, module.blocks[1])
    assert [name for name, each in module.named_parameters() if not each.is_meta] == [
        name for name, _ in module.named_parameters() if name.startswith("blocks.1")
    ]
    whole = materialized(Tied)
    assert torch.equal(module.blocks[1].up.weight, whole.blocks[1].up.weight)


def test_the_language_model_begins_as_it_does_otherwise():
    arguments = {"layers": 2, "width": 256}
    for module in (
        language_model.LanguageModel(**arguments),
        materialized(language_model.LanguageModel, **arguments),
    ):
        for name, value in module.named_parameters():
            if "norm" in name:
                expected = torch.ones_like(value) if name.endswith("weight") else 0 * value
                assert torch.equal(value, expected), name
            elif value.ndim > 1:
                assert abs(float(value.detach().std()) - 0.02) < 1e-3, name
                assert abs(float(value.detach().mean())) < 1e-3, name
            else:
                assert torch.equal(value, torch.zeros_like(value)), name


class Scale(nn.Module):
    """Has a parameter and no way to say what it begins with, and a buffer that keeps its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3, 3).tril())


class Scaled(trainer.TrainingModule):
    """Says nothing of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Scale()


class SaysScale(Scaled):
    """Says all."""

    def initialize(self, name: str, layer: nn.Module) -> None:
        nn.init.constant_(layer.scale, 2.0)


def test_a_layer_that_says_nothing_of_its_values_is_named():
    with pytest.raises(UserError, match="does not initialize last \\(Scale\\); over"):
        materialized(Scaled)


def test_a_module_says_what_its_layers_begin_with_and_buffers_keep_their_values():
    module = materialized(SaysScale)
    assert module.last.scale.tolist() == [2, 2, 2]
    assert torch.equal(module.last.mask, torch.ones(3, 3).tril())


def test_the_command_line_builds_without_memory(tmp_path):
    done = run(
        fit(
            *("--trainer.meta_device", "true", "--trainer.devices", "1"),
            *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "3"),
            *("--trainer.loggers", "[csv]", "--trainer.default_root_dir", tmp_path),
            *("--trainer.run_name", "run"),
        )
    )
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    values = {row.split(",")[2]: float(row.split(",")[3]) for row in rows}
    assert values["val_accuracy"] > 0.8
