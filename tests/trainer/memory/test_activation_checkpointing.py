"""Activation checkpointing computes the same, to the last bit, and keeps less."""

import copy
import pickle
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.loop import evaluation
from my_project_trainer.memory import activation_checkpointing
from torch import Tensor, nn

import fitting
from checkpointed_subject import FEATURES, Block, Model, Network
from fitting import logged, saved

applied = activation_checkpointing.applied


def computed(names: list[str], half: bool = False) -> dict[str, Tensor]:
    """Gradients and buffers after three batches, and the next random number."""
    torch.manual_seed(0)
    network = Network()
    batches = torch.randn(3, 6, FEATURES)
    with applied(network, names):
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = network(batch).square().mean()
            loss.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return {**gradients, **dict(network.named_buffers()), "random": torch.rand(1)}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ["Block"],
        ["layers.*"],
        ["layers.[12]", "images"],
        ["Linear", "layers.*.norm", "images.0"],
        ["Block", "layers.*.norm", "layers.?.second"],  # one inside the other
    ],
)
def test_gradients_and_buffers_are_equal_to_the_last_bit(names, half):
    kept, again = computed([], half), computed(names, half)
    assert len(kept) > 20
    for name, tensor in kept.items():
        assert tensor.equal(again[name]), name


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kept", [activation_checkpointing.buffers_kept, evaluation._same_buffers])
def test_buffers_of_scripted_layers_are_kept(kept):
    norm = torch.jit.script(nn.BatchNorm1d(2))
    with kept(nn.Sequential(norm)):
        norm(torch.ones(4, 2))
    assert norm.num_batches_tracked == norm.running_mean.sum() == 0


def test_less_is_kept():
    def kept(names: list[str]) -> int:
        """Bytes that wait for backward."""
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        network = Network()
        with applied(network, names), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            network(torch.randn(1000, FEATURES)).sum()
        return total

    everything, some, least = kept([]), kept(["layers.0"]), kept(["Block"])
    assert 0 < least < 0.2 * everything
    assert least < some < everything
    assert kept(["Block", "layers.*.norm"]) == least


def test_without_gradients_nothing_is_computed_twice(tmp_path):
    forwards = {}
    for names in ([], ["Block"]):
        options = {"max_epochs": 1, "global_batch_size": 12, "activation_checkpointing": names}
        metrics = fitting.fit(Model(), tmp_path / str(len(names)), **options).metrics
        forwards[len(names)] = [metrics["forwards"], metrics["forwards_in_validation"]]
    # Four blocks a batch: one of the sanity check, and four, the last counted before its backward.
    assert forwards == {0: [20, 4], 1: [32, 4]}


def test_the_model_stays_what_it_is():
    network = Network()
    before = dict(network.named_modules()), dict(network.named_parameters()), network.state_dict()
    with applied(network, ["Block"]), applied(network, ["layers.*"]):
        assert type(network.layers[0]) is Block
        after = dict(network.named_modules()), dict(network.named_parameters())
        assert after == before[:2]
        assert list(network.state_dict()) == list(before[2])
    assert all("forward" not in vars(module) for module in network.modules())


def test_a_copy_computes_with_its_own_parameters():
    network = Network()
    with applied(network, ["Block"]):
        for copied in [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]:  # noqa: S301
            copied(torch.randn(4, FEATURES)).sum().backward()
            assert all(one.grad is not None for one in copied.parameters())
            assert [layer.calls.item() for layer in copied.layers] == [2, 1, 1]
    assert all(parameter.grad is None for parameter in network.parameters())
    assert [layer.calls.item() for layer in network.layers] == [0, 0, 0]


@pytest.mark.slow
def test_the_largest_batch_is_found_with_it(monkeypatch, tmp_path):
    sizes = []
    forward = Block.forward

    def counts(self: Block, x: Tensor, **options: Any) -> Tensor:
        sizes.append(len(x))
        return forward(self, x, **options)

    monkeypatch.setattr(Block, "forward", counts)
    options = {"accelerator": "cpu", "max_steps": 1, "default_root_dir": tmp_path, "devices": 1}
    for names, times in (([], 4), (["Block"], 8)):
        sizes.clear()
        model = Model()
        for layer in model.network.layers:
            layer.norm = nn.Identity()  # a BatchNorm takes no single sample
        alone = trainer.Trainer(**options, activation_checkpointing=names)
        assert alone.find_batch_size(model) == 48
        assert sizes.count(48) == 2 * times  # steps


UNKNOWN = ": nothing in the model is named"
KNOWN = (
    "known: BatchNorm1d, Block, Dropout, InstanceNorm1d, Linear, ModuleList, Network, Sequential"
)
LAYERS = "did you mean 'network.layers.2' or 'network.layers.1' or 'network.layers.0'?"
NEVER_CALLED = (
    ": 'network.layers' is a ModuleList, which is never called itself; name what is in it: "
    "'network.layers.*'"
)


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["Blok"], [f"{UNKNOWN} 'Blok'; did you mean 'Block'?"]),
        (["netwrk.layers.*"], [f"{UNKNOWN} 'netwrk.layers.*'; {LAYERS}"]),
        (["layers.*"], [f"{UNKNOWN} 'layers.*'; {KNOWN}, Tanh"]),
        (["network.layers", "x"], [NEVER_CALLED, f"{UNKNOWN} 'x'; {KNOWN}, Tanh"]),
        ("Block", ["='Block': give a list of names, for example ['Block']"]),
    ],
)
def test_a_name_that_means_nothing_is_refused_before_anything_starts(names, lines):
    options = {"accelerator": "cpu", "devices": 2, "max_steps": 1}
    with pytest.raises(ConfigurationError) as raised:
        trainer.Trainer(**options, activation_checkpointing=names).fit(Model())
    assert raised.value.problems == [f"activation_checkpointing{line}" for line in lines]


def test_a_forward_that_was_put_on_an_object_is_not_replaced():
    network = Network()
    vars(network.head)["forward"] = nn.Identity()
    with pytest.raises(ConfigurationError, match="of its own was given to a Linear"):
        activation_checkpointing.select(network, ["head"])


# Whatever strategy trains, a name and the options of its trainer.
RUNS = {
    "single_device": {"devices": 1},
    "single_device, bf16": {"devices": 1, "precision": "bf16-mixed"},
    "ddp": {"strategy": "ddp"},
    "ddp, accumulation": {"strategy": "ddp", "accumulate_grad_batches": 2},
    "ddp, sync batchnorm": {"strategy": "ddp", "sync_batchnorm": True},
    "ddp, unused": {"strategy": "ddp", "strategy_options": {"find_unused_parameters": True}},
    "ddp_zero1": {"strategy": "ddp_zero1"},
    "ddp_fork": {"strategy": "ddp_fork"},
    "ddp_spawn": {"strategy": "ddp_spawn"},
    "dp": {"strategy": "dp"},
    "ddp2": {"strategy": "ddp2"},
    "fsdp": {"strategy": "fsdp", "strategy_options": {"unit_classes": ["Block"]}},
    "fsdp, inner units": {"strategy": "fsdp", "strategy_options": {"unit_classes": ["Linear"]}},
    "hsdp": {"strategy": "hsdp", "strategy_options": {"unit_parameters": 100}},
}
QUICK = ("single_device", "ddp", "dp")


SLOW = ("ddp, sync batchnorm", "fsdp", "hsdp")  # and these in CI


def marks(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.slow, *[pytest.mark.exhaustive] * (name not in SLOW)]


@pytest.mark.parametrize("name", [pytest.param(run, marks=marks(run)) for run in RUNS])
@pytest.mark.slow
def test_every_strategy_trains_the_same(tmp_path, name):
    kept = {"module": "checkpointed_subject.Model", "devices": 2, "global_batch_size": 12}
    kept |= {"max_epochs": 1, "loggers": ["csv"], "log_every_n_steps": 1, **RUNS[name]}
    again = kept | {"activation_checkpointing": ["Block", "network.images"]}
    stopped = again | {"max_steps": 3, "checkpoint_every_n_steps": 1}
    resumed = again | {"resume": str(tmp_path / "stopped")}
    runs = {"kept": kept, "again": again, "stopped": stopped, "resumed": resumed}
    ends = fitting.fits(tmp_path, [{"name": run, **options} for run, options in runs.items()])
    assert all(set(outcomes.values()) == {""} for outcomes in ends)
    forwards, rows, weights = [], [], {run: saved(tmp_path / run) for run in runs}
    for run in ("kept", "again"):
        forwards += logged(tmp_path / run, "forwards")
        lines = (tmp_path / run / "metrics.csv").read_text().splitlines()
        rows.append([line for line in lines if ",forwards," not in line])
    assert forwards[1] > 1.5 * forwards[0]
    assert rows[0] == rows[1]
    for key, weight in weights["kept"].items():
        assert weight.equal(weights["again"][key])
        assert weight.equal(weights["resumed"][key])
