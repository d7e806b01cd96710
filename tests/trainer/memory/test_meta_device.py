"""Models that are built without memory."""

import json

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.checkpoint.dtensors import full, is_sharded
from my_project_trainer.errors import UserError
from my_project_trainer.memory import meta_device
from my_project_trainer.module.current_run import TrainerState
from safetensors.torch import save_file
from tests.project import fit, succeed
from torch import nn

import initial_weights_subject
from fitting import fits, logged, quiet, saved
from my_project.tasks import language_model
from sharding_subject import Tied


class Run:
    def __init__(self, seed: int) -> None:
        self.seed = seed


def materialized(make: type, seed: int = 0, **arguments: object) -> nn.Module:
    """A module that was built without memory, whole."""
    with meta_device.building():
        module = make(**arguments)
    module.trainer_state = TrainerState(run=Run(seed))
    meta_device.Initializer(module).materialize(module)
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


def test_what_a_peer_initializes_is_allocated_on_the_device():
    with meta_device.building():
        module = Tied()
    module.trainer_state = TrainerState(run=Run(0))
    # The meta device stands for a GPU.
    sources = meta_device.Initializer(module, 1, 2, "meta").materialize(module)
    devices = {(sources[id(parameter)], parameter.device.type) for parameter in module.parameters()}
    assert devices == {(0, "meta"), (1, "cpu")}


def test_pieces_have_the_values_of_the_whole():
    with meta_device.building():
        module = Tied()
    module.trainer_state = TrainerState(run=Run(0))
    meta_device.Initializer(module).materialize(module.blocks[1])
    assert [name for name, parameter in module.named_parameters() if not parameter.is_meta] == [
        name for name, _ in module.named_parameters() if name.startswith("blocks.1")
    ]
    assert torch.equal(module.blocks[1].up.weight, materialized(Tied).blocks[1].up.weight)


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
    def __init__(self) -> None:
        super().__init__()
        self.last = Scale()


class SaysScale(Scaled):
    def initialize(self, name: str, layer: nn.Module) -> None:
        nn.init.constant_(layer.scale, 2.0)


def test_a_layer_that_says_nothing_of_its_values_is_named():
    with pytest.raises(UserError, match="does not initialize last \\(Scale\\); over"):
        materialized(Scaled)


def test_a_module_says_what_its_layers_begin_with_and_buffers_keep_their_values():
    module = materialized(SaysScale)
    assert module.last.scale.tolist() == [2, 2, 2]
    assert torch.equal(module.last.mask, torch.ones(3, 3).tril())


class Drawn(initial_weights_subject.Net):
    """Notes the layers that are initialized, and what is whole in memory meanwhile, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[str] = []
        self.sizes: list[int] = []

    def initialize(self, name: str, layer: nn.Module) -> None:
        self.drawn.append(name)
        there = [p for p in self.parameters() if not (p.is_meta or is_sharded(p))]
        self.sizes.append(sum(parameter.nbytes for parameter in there))
        super().initialize(name, layer)


LAYERS = [f"sequential_module.{index}" for index in (0, 2, 3, 4)]


def drawn_by(strategy: str, run: str, command: str = "fit", **options: object) -> Drawn:
    """A module after a command on one process; ``run``: where it is saved."""
    units = {"strategy_options": {"unit_parameters": 1}} if strategy == "fsdp" else {}
    fixed = {"meta_device": True, "limit_val_batches": 0, "max_steps": 1}
    made = quiet(**{**fixed, "strategy": strategy, "run_name": run, **units, **options})
    with made.building():
        module = Drawn()
    arguments = {} if command == "fit" else {"checkpoint": f"runs/{run}"}
    getattr(made, command)(module, **arguments)
    return module


@pytest.mark.parametrize("strategy", ["single_device", "fsdp"])
def test_nothing_is_initialized_that_a_checkpoint_or_a_file_overwrites(
    tmp_path, monkeypatch, strategy
):
    monkeypatch.chdir(tmp_path)
    first = drawn_by(strategy, "run")
    assert sorted(first.drawn) == LAYERS
    if strategy == "fsdp":  # a unit at a time, and the largest has two tied layers
        assert max(first.sizes) <= 4 * (6 * 6 + 6 + 6)
    resumed = drawn_by(strategy, "run", resume="auto", max_steps=2)
    started = drawn_by(strategy, "other", weights="runs/run")
    tested = drawn_by(strategy, "run", "test")
    weights = saved(tmp_path / "runs" / "run")
    shared = "sequential_module.2.weight"  # of which a file needs one name only
    save_file({name: param for name, param in weights.items() if name != shared}, "one.safetensors")
    from_file = drawn_by(strategy, "file", weights="one.safetensors")
    assert resumed.drawn == started.drawn == tested.drawn == from_file.drawn == []
    for name, value in tested.state_dict().items():
        assert torch.equal(full(value), weights[name]), name


def test_each_layer_is_initialized_by_one_rank(tmp_path):
    units = {"unit_parameters": 200}
    cases = {"fsdp": units, "hsdp": units, "mesh": {"tensor": 2}}
    shared = {"module": "sharding_subject.Begins", "devices": 2, "meta_device": True}
    shared |= {"max_steps": 1, "limit_val_batches": 0}
    runs = [
        {"name": name, "strategy": name, "strategy_options": options, **shared}
        | {"init": {"folder": str(tmp_path / name)}}
        for name, options in cases.items()
    ]
    assert fits(tmp_path, runs) == [dict.fromkeys(cases, "")] * 2
    expected = materialized(Tied)
    layers = ["blocks.0.down", "blocks.0.norm", "blocks.0.up"]
    layers += [name.replace("0", "1") for name in layers]
    for strategy in cases:
        notes = [tmp_path / strategy / f"drawn-{rank}.json" for rank in (0, 1)]
        drawn = [json.loads(note.read_text()) for note in notes]
        # Tied layers overwrite each other, so one rank has both.
        assert {"tokens", "head"} <= set(drawn[0]), strategy
        assert sorted(drawn[0] + drawn[1]) == sorted([*layers, "head", "tokens"]), strategy
        sizes = [sum(map(torch.numel, parameters(expected, names))) for names in drawn]
        assert max(sizes) < 0.6 * sum(sizes), strategy
        weights = saved(tmp_path / strategy)
        for name, value in expected.named_parameters():
            assert torch.equal(weights[name], value), (strategy, name)


def parameters(module: nn.Module, layers: list[str]) -> list[torch.Tensor]:
    """Those of layers, each once."""
    by_id = {id(p): p for layer in layers for p in module.get_submodule(layer).parameters()}
    return list(by_id.values())


def test_the_command_line_builds_without_memory(tmp_path):
    succeed(
        fit(
            *("--trainer.meta_device", "true", "--trainer.devices", "1"),
            *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "3"),
            *("--trainer.loggers", "[csv]", "--trainer.default_root_dir", tmp_path),
            *("--trainer.run_name", "run"),
        )
    )
    assert logged(tmp_path / "run", "val_accuracy")[-1] > 0.8
