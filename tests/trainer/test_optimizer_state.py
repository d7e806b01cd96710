"""Optimizer states by name: what torch's own functions for them (of 2.13) lose or refuse."""

import copy
from typing import Any

import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies.optimizer_state import (
    load_optimizer_state,
    optimizer_state,
    parameter_names,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer


def get(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state by ours, as a checkpoint would hold it."""
    return copy.deepcopy(optimizer_state(optimizer, parameter_names(module)))


def load(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put back what :func:`get` gave."""
    load_optimizer_state(optimizer, state, parameter_names(module))


def model() -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(module: nn.Module, *optimizers: Optimizer, steps: int = 2) -> Tensor:
    """Some steps; gives the weights after them, flattened."""
    inputs = torch.linspace(-1, 1, 15).view(5, 3)
    for _ in range(steps):
        module(inputs).square().sum().backward()
        for each in optimizers:
            each.step()
        for parameter in module.parameters():
            parameter.grad = None
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def test_a_save_before_the_first_step_changes_nothing() -> None:
    plain, saved = model(), model()
    optimizer = Adam(saved.parameters(), lr=0.1)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    get(saved, optimizer)
    assert not stepped
    assert not optimizer.state
    expected = train(plain, Adam(plain.parameters(), lr=0.1))
    assert torch.equal(train(saved, optimizer), expected)


def test_a_parameter_that_has_never_had_a_gradient() -> None:
    first, second = model(), model()
    for each in (first, second):
        each.register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer, other = Adam(first.parameters()), Adam(second.parameters())
    train(first, optimizer)
    load(second, other, get(first, optimizer))
    assert len(other.state) == len(optimizer.state) == 4


def test_a_parameter_that_is_frozen_for_the_moment() -> None:
    first, second = model(), model()
    optimizer, other = Adam(first.parameters()), Adam(second.parameters())
    train(first, optimizer)
    for each in (first, second):
        each[0].weight.requires_grad_(False)
    load(second, other, get(first, optimizer))
    assert len(other.state) == 4


def test_two_optimizers_of_the_same_parameters() -> None:
    module = model()
    both = [Adam(module.parameters()), SGD(module.parameters(), lr=0.1, momentum=0.9)]
    train(module, *both)
    ours = [set(get(module, each)["state"]["0.weight"]) for each in both]
    assert ours == [{"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}]


def test_groups_that_are_cut_otherwise() -> None:
    first, second = model(), model()
    optimizer = Adam(first.parameters(), lr=0.5)
    other = Adam([{"params": each.parameters(), "lr": 0.1} for each in second])
    train(first, optimizer)
    with pytest.raises(ConfigurationError, match="groups its parameters differently"):
        load(second, other, get(first, optimizer))
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]


def test_how_a_step_is_computed_is_this_run_s() -> None:
    first, second = model(), model()
    optimizer, other = Adam(first.parameters(), fused=True), Adam(second.parameters())
    train(first, optimizer)
    load(second, other, get(first, optimizer))
    assert other.param_groups[0]["fused"] is None
