"""Parts of a pipeline: schedules, balances, and one line for each mistake."""

import contextlib
import functools
import gc
import weakref
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies.balance import divide, total
from my_project_trainer.strategies.pipeline import partition
from my_project_trainer.strategies.pipeline.measure import measure
from my_project_trainer.strategies.pipeline.schedules import NAMES, Action, Kind, order
from torch import Tensor, nn

from pipeline_subject import Subject

COSTS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUTS: 1, Kind.WEIGHTS: 1}


def inputs(action: Action, stages: int) -> list[Action]:
    """What an action waits for."""
    kind, stage, number = action
    if kind is Kind.FORWARD:
        return [Action(kind, stage - 1, number)] if stage else []
    if kind is Kind.WEIGHTS:
        return [Action(Kind.INPUTS, stage, number)]
    later = [Action(kind, stage + 1, number)] if stage < stages - 1 else []
    return [Action(Kind.FORWARD, stage, number), *later]


def cost(action: Action) -> int:
    """Of the first stage, all gradients are computed at once."""
    if action.stage == 0 and action.kind in (Kind.INPUTS, Kind.WEIGHTS):
        return 2 if action.kind is Kind.INPUTS else 0
    return COSTS[action.kind]


def simulate(name: str, processes: int, rounds: int, count: int) -> tuple[int, list[int]]:
    """The time of a step, and how many micro-batches each process holds at most."""
    stages = processes * rounds
    orders = [order(name, each, processes, stages, count) for each in range(processes)]
    ends: dict[Action, int] = {}
    free, at = [0] * processes, [0] * processes
    while any(place < len(own) for place, own in zip(at, orders, strict=True)):
        before = list(at)
        for process, own in enumerate(orders):
            while at[process] < len(own):
                action = own[at[process]]
                if not all(each in ends for each in inputs(action, stages)):
                    break
                started = max([free[process], *(ends[each] for each in inputs(action, stages))])
                free[process] = ends[action] = started + cost(action)
                at[process] += 1
        assert at != before, "each process waits for another one"
    return max(free), [held(own) for own in orders]


def held(actions: list[Action]) -> int:
    """How many forwards wait for the end of their backward at once."""
    last = Kind.WEIGHTS if any(each.kind is Kind.WEIGHTS for each in actions) else Kind.BACKWARD
    now = most = 0
    for action in actions:
        now += (action.kind is Kind.FORWARD) - (action.kind is last)
        most = max(most, now)
    return most


@pytest.mark.parametrize("count", [*range(1, 10), 16])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_schedules_wait_as_long_as_in_theory(processes, count):
    waiting = processes - 1
    gpipe, in_gpipe = simulate("gpipe", processes, 1, count)
    alternating, in_1f1b = simulate("1f1b", processes, 1, count)
    assert gpipe == alternating == 3 * (count + waiting)
    assert in_gpipe == [count] * processes
    assert in_1f1b == [min(count, processes - each) for each in range(processes)]
    zero_bubble, in_zero_bubble = simulate("zero_bubble", processes, 1, count)
    assert in_zero_bubble == [min(count, processes)] * processes
    if count >= processes:
        assert zero_bubble == 3 * count + waiting
    interleaved, _ = simulate("interleaved", processes, 2, count)
    if count % processes == 0:
        assert interleaved == 3 * (2 * count + waiting)


@pytest.mark.parametrize("name", NAMES)
def test_each_action_runs_once(name):
    actions = order(name, 1, 3, 6 if name == "interleaved" else 3, 6)
    kinds = 3 if name == "zero_bubble" else 2
    assert len(actions) == len(set(actions)) == 6 * kinds * (2 if name == "interleaved" else 1)


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
    found = divide(total(costs), len(costs), stages)
    assert sum(found) == len(costs)
    assert all(size > 0 for size in found)
    largest = [
        max(sum(costs[index] for index in part) for part in partition.bounds(each))
        for each in (found, sizes)
    ]
    assert largest[0] == largest[1]


@pytest.mark.parametrize("kind", ["norm", "tied"])  # one counts batches, one changes its input
def test_children_are_measured_and_stay_as_they_are(kind):
    module = Subject(kind)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    batch = next(iter(module.train_dataloader()))
    state = torch.get_rng_state()
    found = measure(
        module, lambda: module.training_step(batch, 0), torch.enable_grad, torch.device("cpu")
    )
    assert torch.equal(state, torch.get_rng_state())
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(each.grad is None for each in module.parameters())
    assert [each.parameters for each in found] == [
        16 * sum(p.numel() for p in child.parameters()) for child in module.sequential_module
    ]
    # Four samples, eight wide; the third child gets sixteen.
    assert [each.inputs for each in found] == [4 * 4 * wide for wide in (8, 16, 16, 8, 8, 8)]
    assert found[0].saved == 4 * 4 * 8
    assert all(each.seconds > 0 for each in found)


class NotSequential(trainer.TrainingModule):
    """A list of layers in place of a sequential module."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.ModuleList([nn.Linear(1, 1)])

    training_step, configure_optimizers = Subject.training_step, Subject.configure_optimizers
    train_dataloader = Subject.train_dataloader


class Manual(Subject):
    """Steps its optimizers itself."""

    automatic_optimization = False


def test_a_measurement_keeps_no_activations() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    class Kept(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)  # saved for its own backward
            outputs.append(weakref.ref(found))
            return found

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
    assert all(each() is None for each in outputs)


@pytest.mark.parametrize(
    ("options", "more", "lines"),
    [
        ({"microbatches": 0}, {}, ["strategy_options.microbatches=0: give at least 1"]),
        ({"schedule": "1f1"}, {}, ["strategy_options.schedule='1f1' is unknown; .*'1f1b'"]),
        ({"checkpoint": "x", "stages": 0}, {}, ["checkpoint='x' is unknown", "stages=0: give at"]),
        ({"balance": "speed"}, {}, ["strategy_options.balance='speed' is unknown"]),
        ({"balance": [1, 0]}, {}, ["each stage needs a child"]),
        ({"balance": [1, 2, 3]}, {}, ["has 3 entries for 2 stages"]),
        ({"stages": 3}, {"devices": 4}, ["stages=3: 4 processes are not divisible by it"]),
        ({"stages_per_process": 2}, {}, ["stages_per_process has no effect with schedule='1f1b'"]),
        (
            {"schedule": "interleaved", "microbatches": 3},
            {},
            ["microbatches=3: schedule='interleaved' needs a multiple of the 2 processes"],
        ),
        ({"schedule": "interleaved", "stages": 1}, {}, ["and a pipeline has one here"]),
        (
            {"schedule": "zero_bubble", "checkpoint": "always"},
            {},
            ["schedule='zero_bubble' divides a backward in two"],
        ),
        ({}, {"precision": "16-mixed"}, ["each stage would have to skip the same steps"]),
        ({}, {"compile": True}, ["does not support compile"]),
        ({}, {"uneven_inputs": "join"}, ["does not support uneven_inputs='join': all stages"]),
        ({}, {"activation_checkpointing": ["Linear"]}, ["use strategy_options.checkpoint"]),
        ({}, {"sync_batchnorm": True}, ["a stage normalizes micro-batches"]),
    ],
)
def test_mistakes_of_options(options, more, lines):
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_steps": 1} | more
    with pytest.raises(ConfigurationError) as caught:
        trainer.Trainer(strategy="sequential", strategy_options=options, **given)
    assert len(caught.value.problems) == len(lines)
    for line in lines:
        caught.match(line)


@pytest.mark.parametrize(
    ("options", "module", "line"),
    [
        ({}, NotSequential, "an nn.Sequential; NotSequential has a ModuleList"),
        ({}, Manual, "a pipeline runs forward and backward itself"),
        ({"balance": [2, 5]}, Subject, r"is of 7 children; Subject.sequential_module has 6"),
        ({"schedule": "interleaved", "stages_per_process": 4}, Subject, "6 children for 8 stages"),
    ],
)
def test_mistakes_of_modules(options, module, line):
    run = trainer.Trainer(
        strategy="pipeline", strategy_options=options, accelerator="cpu", devices=2, max_steps=1
    )
    with pytest.raises(ConfigurationError, match=line) as caught:
        run.check_fit(module())
    assert len(caught.value.problems) == 1
