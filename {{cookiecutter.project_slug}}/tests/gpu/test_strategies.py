"""Every strategy on the GPU against the CPU, through a stop and a resume, and between the two."""

from functools import cache
from typing import Any

import pytest
import torch

from ..conformance.matrix import MATRIX
from . import device
from .strategies import BOUNDS, all_of, options, registry
from .subject import Sequences
from .training import STOP, Trained, distance, is_same, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
SAVING = {"checkpoint_every_n_steps": 1}
ON_CPU = {"accelerator": "cpu", "strategy": "single_device"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def reference(folder):
    """What one process computes on the CPU in float32, by the arguments of the module."""

    @cache
    def trained(**arguments) -> Trained:
        name = "-".join(["cpu", *map(str, arguments.values())])
        return train(folder, name, Sequences(**arguments), **ON_CPU)

    return trained


@pytest.fixture(scope="module")
def runs(folder):
    """A whole fit, and one that was stopped after some steps and resumed."""

    @cache
    def both(strategy: str, precision: str, **arguments) -> tuple[Trained, Trained]:
        name = "-".join([strategy, precision, *map(str, arguments.values())])
        shared = {**options(strategy), "precision": precision, "deterministic": True}
        uninterrupted = train(folder, name, Sequences(**arguments), **shared)
        stop = {**shared, **SAVING, "max_steps": STOP}
        stopped = train(folder, f"{name}-stopped", Sequences(**arguments), **stop)
        resume = {**shared, "resume": str(stopped.directory)}
        return uninterrupted, train(folder, f"{name}-resumed", Sequences(**arguments), **resume)

    return both


def assert_near(one: Trained, other: Trained, bound: float, record_property) -> None:
    difference = distance(one, other)
    record_property("found", f"{difference:.1e} (bound {bound:.0e})")
    assert difference <= bound


def test_every_registered_strategy_is_checked():
    checked = {case.values[0] for case in all_of(precisions=True)}
    elsewhere = {row.strategy or name for name, row in MATRIX.items() if not row.launches}
    assert checked - elsewhere == set(registry.names()) - elsewhere


def test_a_fault_would_be_seen(reference, folder):
    """Each bound is far below what one other batch makes of the weights and losses."""
    other = train(folder, "seed", Sequences(), seed=1, **ON_CPU)
    assert distance(reference(), other) > 5 * max(BOUNDS.values())


@pytest.mark.parametrize(("strategy", "precision"), all_of(precisions=True))
def test_equals_the_cpu(runs, reference, record_property, strategy, precision):
    uninterrupted, _ = runs(strategy, precision)
    assert_near(uninterrupted, reference(), BOUNDS[precision], record_property)


@pytest.mark.parametrize(("strategy", "precision"), all_of(precisions=True))
def test_resumes_to_the_last_bit(runs, strategy, precision):
    uninterrupted, resumed = runs(strategy, precision)
    assert is_same(uninterrupted, resumed)


@pytest.mark.parametrize("strategy", all_of(precisions=False))
def test_fused_adamw_equals_the_cpu_and_resumes(runs, reference, record_property, strategy):
    uninterrupted, resumed = runs(strategy, "32-true", optimizer="fused")
    assert is_same(uninterrupted, resumed)
    assert_near(uninterrupted, reference(optimizer="adamw"), 1e-4, record_property)


@pytest.mark.parametrize("strategy", all_of(precisions=False))
def test_dropout_is_resumed_to_the_last_bit(runs, reference, strategy):
    uninterrupted, resumed = runs(strategy, "32-true", dropout=0.3)
    assert distance(uninterrupted, reference()) > 1e-3  # it was not left out
    assert is_same(uninterrupted, resumed)


def moved(folder, name: str, here: dict[str, Any], there: dict[str, Any]) -> Trained:
    """A fit that is stopped here and resumed there."""
    stop = {**here, **SAVING, "max_steps": STOP}
    stopped = train(folder, name, Sequences(optimizer="adamw"), **stop)
    resume = {**there, "resume": str(stopped.directory)}
    return train(folder, f"{name}-resumed", Sequences(optimizer="adamw"), **resume)


@pytest.mark.parametrize("strategy", all_of(precisions=False))
def test_a_checkpoint_of_the_gpu_is_resumed_on_the_cpu(
    folder, reference, record_property, strategy
):
    resumed = moved(folder, f"{strategy}-left", options(strategy), ON_CPU)
    assert_near(resumed, reference(optimizer="adamw"), 1e-4, record_property)


@pytest.mark.parametrize("strategy", all_of(precisions=False))
def test_a_checkpoint_of_the_cpu_is_resumed_on_the_gpu(
    folder, reference, record_property, strategy
):
    resumed = moved(folder, f"{strategy}-came", ON_CPU, options(strategy))
    assert_near(resumed, reference(optimizer="adamw"), 1e-4, record_property)


def test_the_default_precision_of_matrix_products_is_near(folder, reference, record_property):
    """The default on GPUs is TF32: 2^-11 of a value instead of 2^-24."""
    trained = train(folder, "default", Sequences(), matmul_precision="high")
    assert_near(trained, reference(), 5e-3, record_property)


def test_dp_runs_two_replicas_on_one_device():
    from my_project_trainer.strategies.replicated import dp

    module = torch.nn.Linear(3, 2).to(device.DEVICE)
    x = torch.randn(5, 3)
    outputs = [
        dp.replicate(module, device.DEVICE, is_first=index == 0)(piece)
        for index, piece in enumerate(x.to(device.DEVICE).split([3, 2]))
    ]
    dp.gather(outputs, device.DEVICE).sum().backward()
    gradient = module.weight.grad.clone()
    module.weight.grad = None
    module(x.to(device.DEVICE)).sum().backward()
    assert torch.allclose(gradient, module.weight.grad)
