"""Meshes: a GPT equals one process in each, and goes on under another; dropout; refused plans."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies.model_parallel.mesh.plan import Sizes
from my_project_trainer.strategies.model_parallel.mesh.styles import ShardedRandomness
from safetensors.torch import load_file
from tests.conformance.rows import ROUNDING
from tests.project import succeed
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from mesh_subject import CONTEXT, GPT, SAMPLES

SECONDS = 600.0
pytestmark = pytest.mark.timeout(4 * SECONDS)

# Sizes, and from whose checkpoints it goes on as well.
UNITS = {"unit_classes": ["Block"]}
SHARDED = {"data": 1, "shard": 2, "tensor": 2, **UNITS}
ALL = {"data": 2, "shard": 2, "tensor": 2, **UNITS}
RUNS: dict[str, tuple[int, str, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, "single_device", {}, ()),
    "two": (2, "tensor_parallel", {}, ("one",)),
    "four": (4, "mesh", {"strategy_options": SHARDED}, ("two",)),
    "eight": (8, "mesh", {"strategy_options": ALL}, ("four",)),
    "replicas": (4, "mesh", {"strategy_options": {"tensor": 2}}, ("four",)),
    "one_again": (1, "single_device", {}, ("two", "four")),
    "ddp": (2, "ddp", {}, ("two", "four")),
    "fsdp": (2, "fsdp", {}, ("two", "four")),
    "dropout": (2, "tensor_parallel", {"model": {"dropout": 0.3}}, ()),
    "computed_again": (
        2,
        "tensor_parallel",
        {"model": {"dropout": 0.3}, "activation_checkpointing": ["Block"]},
        (),
    ),
}
TWO = pytest.param("two", marks=pytest.mark.slow)
LEFT_OUT = ("eight", "replicas", "one_again", "fsdp")  # by CI
SLOW = [
    pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.exhaustive] * (name in LEFT_OUT)])
    for name in list(RUNS)[2:]
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    """Trains under a name's mesh once, after those that it goes on from; gives the folder."""
    root = tmp_path_factory.mktemp("mesh-")

    @cache
    def folder(name: str) -> Path:
        devices, strategy, options, sources = RUNS[name]
        for source in sources:
            folder(source)
        words = [root, name, str(devices), strategy, json.dumps(options), *sources]
        succeed(["-m", "mesh_subject", *words], timeout=SECONDS)
        return root

    return folder


def distance(one: Path, other: Path) -> float:
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours)


@pytest.mark.parametrize("name", [TWO, *SLOW[:3]])
def test_a_gpt_equals_one_process(results, name):
    alone, folder = results("one"), results(name)
    assert distance(alone / "one.safetensors", folder / f"{name}.safetensors") < ROUNDING
    expected, values = (json.loads((folder / f"{file}.json").read_text()) for file in ("one", name))
    predicted, expected_bytes = values.pop("predicted"), expected.pop("predicted")
    assert predicted == expected_bytes
    assert values["count"] == len(predicted) == SAMPLES
    assert values == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", [TWO, *SLOW[:3], *SLOW[-2:]])
def test_a_resume_is_exact(results, name):
    folder = results(name)
    assert distance(folder / f"{name}.safetensors", folder / f"{name}-resumed.safetensors") == 0


@pytest.mark.parametrize("name", [TWO, *SLOW[:-2]])
def test_each_goes_on_from_what_others_saved(results, name):
    alone, folder = results("one"), results(name)
    for source in RUNS[name][3]:
        path = folder / f"{source}-to-{name}.safetensors"
        assert distance(alone / "one.safetensors", path) < ROUNDING, source


@pytest.mark.slow
def test_activation_checkpointing_draws_the_same_dropout_again(results):
    first, again = results("dropout"), results("computed_again")
    assert distance(first / "dropout.safetensors", again / "computed_again.safetensors") < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("options", [UNITS, {}])
def test_replicas_average_gradients_of_units_during_backward(tmp_path, options):
    succeed(["-m", "mesh_subject", "order", tmp_path, json.dumps({"data": 2, **options})])
    for rank in range(2):
        names = json.loads((tmp_path / f"order-{rank}.json").read_text())
        averages = [index for index, name in enumerate(names) if name == "c10d::allreduce_"]
        last_product = max(index for index, name in enumerate(names) if name == "aten::mm")
        # Of the block that backward reaches first, while the other one computes.
        assert any(index < last_product for index in averages) == bool(options)
        assert max(averages) > last_product


@pytest.mark.slow
def test_random_numbers_differ_where_activations_are_sharded_only(tmp_path):
    succeed(["-m", "mesh_subject", "draw", tmp_path, "2", "tensor_parallel"], timeout=SECONDS)
    first, second = (load_file(tmp_path / f"drawn-{rank}.safetensors") for rank in range(2))
    assert first.keys() == second.keys()
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == {name for name in first if name.split()[1] in ("outside", "after", "end")}
    for drawn in (first, second):
        assert torch.equal(drawn["1 again"], drawn["1 computed again"])
        assert not torch.equal(drawn["0 inside"], drawn["1 inside"])
        assert not torch.equal(drawn["0 outside"], drawn["0 after"])
    for rank in range(2):
        values = json.loads((tmp_path / f"drawn-{rank}.json").read_text())
        assert values["seen"] == SAMPLES
        differ = "the gradients of first.weight differ on the ranks of a tensor group"
        assert differ in values["undeclared"]
        assert values["uneven"] == (
            "parallelize_plan shards the output of bytes along dimension 1: its length 7 (shape "
            "(8, 7, 16)) is not divisible by tensor=2; pad or cut each batch to a length that is"
        )


class Planned(trainer.TrainingModule):
    def __init__(self, plan: Any = None) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)
        self.tied = nn.Linear(6, 9)
        self.tied.weight = self.up.weight
        if plan is not None:
            self.parallelize_plan = plan

    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any: ...


def refused(module: Any, strategy: str = "tensor_parallel", **options: Any) -> list[str]:
    """The lines that refuse a module, or options, before any process starts."""
    defaults = {"accelerator": "cpu", "max_steps": 1, "devices": 2, "strategy": strategy, **options}
    with pytest.raises(ConfigurationError) as caught:
        trainer.Trainer(**defaults).check_fit(module)
    return caught.value.problems


def test_a_plan_that_does_not_fit_is_refused_before_processes_start():
    (line,) = refused(Planned())
    assert line.startswith("Planned has no parallelize_plan, which tensor=2 needs: give it a dict")
    wrong = {"upp": ColwiseParallel(), "down": "rows", "d*": RowwiseParallel()}
    assert refused(Planned({**wrong, "norm": ColwiseParallel()})) == [
        "parallelize_plan['down'] is a str: give a style of torch.distributed.tensor.parallel",
        "parallelize_plan names 'upp', and Planned has no such module; did you mean 'up'?",
        "down.weight of shape (6, 9) is sharded along dimension 1: 9 is not divisible by tensor=2",
        "parallelize_plan: norm is a LayerNorm, and ColwiseParallel supports nn.Linear and "
        "nn.Embedding",
    ]
    problem = "parallelize_plan of Planned shards no parameter"
    reason = "give layers a style such as ColwiseParallel(), or use strategy='ddp'"
    assert refused(Planned({"norm": ShardedRandomness()})) == [f"{problem}: {reason}"]
    (line,) = refused(Planned({"up": ColwiseParallel()}), devices=3)
    assert line.startswith("up.weight is used in 2 places, and parallelize_plan would separate")


def test_the_gpt_refuses_heads_and_lengths_that_do_not_divide():
    line = "model.heads=2 is not divisible by tensor=4"
    assert refused(GPT(heads=2, width=16), devices=4) == [line]
    lines = refused(GPT(heads=8, context=CONTEXT + 2), devices=8)
    reason = "10 is not divisible by tensor=8"
    assert lines == [f"positions.weight of shape (10, 16) is sharded along dimension 0: {reason}"]


@pytest.mark.needs("g++")
def test_embeddings_that_torch_cannot_compile_are_refused():
    assert refused(GPT(), compile=True) == [
        f"compile: torch cannot compile {name}, an embedding that RowwiseParallel shards; compile "
        "blocks: compile={'regional': True}, or use ColwiseParallel()"
        for name in ("bytes", "positions")
    ]
    shared = {"accelerator": "cpu", "max_steps": 1, "devices": 2, "strategy": "tensor_parallel"}
    trainer.Trainer(**shared, compile={"regional": True}).check_fit(GPT())


def test_sizes_that_do_not_multiply_to_the_processes_are_refused():
    plan = Planned({"norm": SequenceParallel()})
    for sizes, line in (
        ({"data": 1, "tensor": 2}, "data=1 x tensor=2 is a mesh of 2 processes, and there are 4;"),
        ({"tensor": 3}, "data=-1 x tensor=3: 4 processes are not divisible by 3"),
        ({"shard": 0}, "shard=0: give a number above 0, or -1 for all remaining processes"),
        ({"shard": -1}, "data and shard are -1; only one size may be"),
    ):
        (problem,) = refused(plan, "mesh", devices=4, strategy_options=sizes)
        assert line in problem


@pytest.mark.parametrize(
    ("sizes", "processes", "mesh"),
    [
        (Sizes(), 6, Sizes(data=6)),
        (Sizes(tensor=2), 6, Sizes(data=3, tensor=2)),
        (Sizes(data=2, shard=-1, tensor=2), 8, Sizes(data=2, shard=2, tensor=2)),
        (Sizes(data=1, tensor=-1), 1, Sizes(data=1, tensor=1)),
    ],
)
def test_one_size_is_all_remaining_processes(sizes, processes, mesh):
    assert sizes.on(processes) == mesh
    assert mesh.replicas == mesh.data * mesh.shard
