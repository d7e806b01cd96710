"""Parts of a pipeline: micro-batches, activations, balances, and one line for each mistake."""

import contextlib
import functools
import gc
import json
import weakref
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies.model_parallel.pipeline import activations
from my_project_trainer.strategies.model_parallel.pipeline.activations import Spec, pack, unpack
from my_project_trainer.strategies.model_parallel.pipeline.division import (
    Shape,
    divide,
    measure,
    total,
)
from torch import Tensor, nn

from pipeline_subject import Subject


@pytest.mark.parametrize(
    ("microbatches", "samples", "count"), [(4, 12, 4), (4, 7, 1), (8, 7, 7), (5, 12, 4), (6, 4, 4)]
)
def test_a_batch_runs_with_the_most_micro_batches_that_divide_it(microbatches, samples, count):
    assert Shape(None, "parameters", microbatches, "1f1b", "never").count(samples) == count


def test_what_a_stage_gives_is_packed_without_loss():
    x = torch.randn(3, 4, requires_grad=True)
    output = (
        (x * 2).T,
        torch.arange(5)[1:],
        (x + 1).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.complex(x, x),
        torch.full((2, 2), float("-inf")),
        torch.zeros(()),
    )
    spec = Spec.of(output, "sequential_module.0")
    flat = pack(output, spec, torch.device("cpu"), activations.Uses())
    assert flat.is_contiguous()
    assert flat.shape == spec.empty("meta").shape
    received = flat.detach().requires_grad_()
    values = unpack(received, Spec.from_json(json.loads(json.dumps(spec))))
    for tensor, expected in zip(values, output, strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
        assert tensor.requires_grad == expected.requires_grad
    (values[0].square().sum() + values[2].float().sum() + values[4].abs().square().sum()).backward()
    assert received.grad is not None
    flat.backward(received.grad)
    assert torch.allclose(x.grad, 8 * x.detach() + 1 + 4 * x.detach(), rtol=1e-2)


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 3, [1, 2, 1]),
        ([0, 0, 5], 3, [1, 1, 1]),
        ([3, 1, 4, 1, 5, 9, 2, 6], 3, [4, 2, 2]),
    ],
)
def test_the_largest_stage_is_smallest(costs, stages, sizes):
    counts = divide(total(costs), len(costs), stages)
    assert sum(counts) == len(costs)
    assert all(size > 0 for size in counts)
    largest = [
        max(sum(costs[sum(split[:stage]) :][:size]) for stage, size in enumerate(split))
        for split in (counts, sizes)
    ]
    assert largest[0] == largest[1]


@pytest.mark.parametrize("kind", ["norm", "tied"])  # one counts batches, one changes its input
def test_children_are_measured_and_stay_as_they_are(kind):
    module = Subject(kind)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    batch = next(iter(module.train_dataloader()))
    state = torch.get_rng_state()
    step = functools.partial(module.training_step, batch, 0)
    costs = measure(module, step, torch.enable_grad, torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state())
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert [cost.parameters for cost in costs] == [
        16 * sum(p.numel() for p in child.parameters()) for child in module.sequential_module
    ]
    # Four samples, eight wide; the third child gets sixteen.
    assert [cost.inputs for cost in costs] == [4 * 4 * wide for wide in (8, 16, 16, 8, 8, 8)]
    assert costs[0].saved == 4 * 4 * 8
    assert all(cost.seconds > 0 for cost in costs)


class NotSequential(trainer.TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.ModuleList([nn.Linear(1, 1)])

    training_step, configure_optimizers = Subject.training_step, Subject.configure_optimizers
    train_dataloader = Subject.train_dataloader


class Manual(Subject):
    automatic_optimization = False


def test_a_measurement_keeps_no_activations() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    class Kept(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)  # saved for its own backward
            outputs.append(weakref.ref(output))
            return output

    class Module(trainer.TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.sequential_module = nn.Sequential(nn.Linear(4, 4), Kept(), nn.Linear(4, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.sequential_module(batch).mean()

    module = Module()
    step = functools.partial(module.training_step, torch.ones(8, 4), 0)
    measure(module, step, contextlib.nullcontext, torch.device("cpu"))
    gc.collect()
    assert len(outputs) == 4
    assert all(output() is None for output in outputs)


@pytest.mark.parametrize(
    ("options", "more", "lines"),
    [
        ({"microbatches": 0}, {}, ["strategy_options.microbatches=0: expected int >= 1"]),
        ({"schedule": "zero_bubble"}, {}, [r"schedule='zero_bubble': expected .*'gpipe', '1f1b'"]),
        ({"checkpoint": "x", "stages": 0}, {}, ["checkpoint='x': expected", "stages=0: expected"]),
        ({"balance": "speed"}, {}, ["balance='speed': expected .*'parameters', 'time', 'memory'"]),
        ({"balance": [1, 0]}, {}, [r"balance=\[1, 0\]: expected .*Sequence\[int >= 1\]"]),
        ({"balance": [1, 2, 3]}, {}, ["has 3 entries for 2 stages"]),
        ({"stages": 3}, {"devices": 4}, ["stages=3: 4 processes are not divisible by it"]),
        ({"stages_per_process": 2}, {}, ["each process has one stage; leave it out"]),
        ({}, {"precision": "16-mixed"}, ["each stage would have to skip the same steps"]),
        ({}, {"compile": True}, ["does not support compile"]),
        ({}, {"uneven_inputs": "join"}, ["does not support uneven_inputs='join': all stages"]),
        ({}, {"activation_checkpointing": ["Linear"]}, ["use strategy_options.checkpoint"]),
        ({}, {"sync_batchnorm": True}, ["a stage normalizes micro-batches"]),
    ],
)
def test_mistakes_of_options(options, more, lines):
    arguments: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_steps": 1} | more
    with pytest.raises(ConfigurationError) as caught:
        trainer.Trainer(strategy="sequential", strategy_options=options, **arguments)
    assert len(caught.value.problems) == len(lines)
    for line in lines:
        caught.match(line)


@pytest.mark.parametrize(
    ("options", "module", "line"),
    [
        ({}, NotSequential, "an nn.Sequential; NotSequential has a ModuleList"),
        ({}, Manual, "a pipeline runs forward and backward itself"),
        ({"balance": [2, 5]}, Subject, r"is of 7 children; Subject.sequential_module has 6"),
    ],
)
def test_mistakes_of_modules(options, module, line):
    run = trainer.Trainer(
        strategy="pipeline", strategy_options=options, accelerator="cpu", devices=2, max_steps=1
    )
    with pytest.raises(ConfigurationError, match=line) as caught:
        run.check_fit(module())
    assert len(caught.value.problems) == 1
