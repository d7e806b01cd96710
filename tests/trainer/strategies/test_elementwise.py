"""Optimizers that use more than what a process steps are refused where parameters are cut.

So are gradients of gradients that cannot be right, and noise that ranks would draw differently.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from my_project_trainer.errors import UserError
from my_project_trainer.strategies import engine_optimizers
from my_project_trainer.strategies.precision import Precision
from tests.project import missing, require

import optimizer_subject
from fitting import fits, saved
from processes import at_root

pytestmark = pytest.mark.timeout(600)


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 3))]


def refused(made: torch.optim.Optimizer) -> tuple[bool, bool]:
    """Whether it is refused for slices of parameters, and for some of the parameters."""
    cuts: Any = ("elements", "parameters")
    slices, some = (engine_optimizers.problems_of([made], cut, "fsdp") for cut in cuts)
    return bool(slices), bool(some)


def named(name: str, base: type = torch.optim.SGD) -> torch.optim.Optimizer:
    """An optimizer of a class of this name, in a library whose classes were examined."""
    made: torch.optim.Optimizer = type(name, (base,), {"__module__": "timm.optim"})(parameters())
    return made


@pytest.mark.parametrize(
    ("expected", "names"),
    [
        ((False, False), "Adam AdamW Adan Lion MADGRAD NAdam FusedAdam Adam8bit LambdaSGD"),
        ((True, False), "Adafactor Muon LARS LARS8bit Mars SOAP DistributedShampoo NvNovoGrad"),
        ((True, True), "Lamb LAMB FusedLamb FusedMixedPrecisionLamb LAMB8bit Prodigy DAdaptAdam"),
    ],
)
def test_classes_are_known_by_name(expected: tuple[bool, bool], names: str) -> None:
    refusals = {name: refused(named(name)) for name in names.split()}
    assert refusals == dict.fromkeys(names.split(), expected)


def test_torch_s_own() -> None:
    exported = (getattr(torch.optim, name) for name in dir(torch.optim))
    kinds = {kind for kind in exported if isinstance(kind, type)} - {torch.optim.Optimizer}
    refusing = {kind for kind in kinds if any(refused(kind(parameters())))}
    assert refusing == {torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon}


class Wraps(torch.optim.SGD):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(parameters())
        self.base = base


def test_subclasses_and_optimizers_inside_of_others_are_known() -> None:
    derived = named("Own", type(named("Lamb")))
    assert refused(derived) == refused(Wraps(derived)) == (True, True)
    assert refused(Wraps(named("AdamW"))) == (False, False)


def step(self: Any, closure: Any = None) -> None:
    """A step of a class of the user's own."""


@pytest.mark.parametrize(
    ("expected", "base", "attributes"),
    [
        ((False, False), torch.optim.SGD, {}),
        ((True, True), torch.optim.SGD, {"step": step}),
        ((True, True), torch.optim.SGD, {"step": torch.no_grad()(step)}),
        ((False, False), torch.optim.SGD, {"step": step, "is_elementwise": True}),
        ((True, False), torch.optim.SGD, {"step": step, "is_parameterwise": True}),
        ((True, True), torch.optim.SGD, {"is_elementwise": False}),
        ((True, False), torch.optim.Adafactor, {}),
        ((False, False), optimizer_subject.Marked, {}),
        ((True, True), optimizer_subject.Marked, {"step": step}),
    ],
)
def test_a_class_of_one_s_own_says_what_its_step_uses(expected, base, attributes):
    kind = type("Own", (base,), attributes)
    assert refused(kind(parameters())) == expected
    assert refused(kind(parameters())) == expected  # torch has wrapped its step, once
    assert refused(Wraps(kind(parameters()))) == expected


def fitted(folder: Path, devices: int, *names: str) -> dict[str, str]:
    """The errors of fits by STRATEGY:OPTIMIZER; "" for those that train."""
    runs = []
    for name in names:
        strategy, optimizer = name.split(":")
        model = {"module": "optimizer_subject.Model", "init": {"optimizer": optimizer}}
        how = {"devices": devices, "strategy": strategy, "global_batch_size": 4, "max_steps": 4}
        runs.append({"name": f"{devices}-{strategy}-{optimizer}", **model, **how})
    return dict(zip(names, fits(folder, runs)[0].values(), strict=True))


def weights(run_directory: Path) -> torch.Tensor:
    tensors = saved(run_directory)
    return torch.cat([tensors[key].flatten() for key in sorted(tensors)])


@pytest.mark.parametrize(
    ("engine", "equal", "refused"),
    [
        (
            "torch",
            ("ddp_zero1:lars", "sequential:adafactor", "sequential:early", "ddp_zero1:lion"),
            ("ddp_zero1:lamb", "ddp_zero1:wraps", "sequential:unknown", "fsdp:mixes"),
        ),
        pytest.param(
            "fairscale",
            ("ddp_sharded:lars", "ddp_sharded:set", "ddp_zero1:set", "fsdp:set"),
            ("ddp_sharded:unknown", "ddp_sharded:wraps", "ddp_zero1:saves"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepspeed",
            tuple(f"deepspeed_stage_{n}:{name}" for n in (1, 3) for name in ("lion", "adagrad")),
            tuple(f"deepspeed_stage_{n}" for n in ("1:lars", "3:unknown", "1:early", "3:saves")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_optimizers_that_are_not_refused_equal_one_process(tmp_path, engine, equal, refused):
    if engine != "torch":
        require(missing(engine))
    errors = fitted(tmp_path, 2, *equal, *refused)
    assert {name: error for name, error in errors.items() if error}.keys() == set(refused)
    for name in refused:
        strategy, _, optimizer = name.partition(":")
        other = "elements" if strategy.startswith("deepspeed") else "parameters"
        reasons = {
            "early": "Early, which has a state before its first step",
            "wraps": "Wraps, which cannot be created again from its settings",
            "unknown": "Unknown.is_elementwise = True if an element's update depends on that",
            "saves": "Saves, whose own state_dict would not be saved",
            "mixes": "Mixes cannot step sharded parameters (aten.mul.Tensor got mixed",
        }
        known = f"{optimizer.title()}, which uses other {other} than those that a process steps"
        assert reasons.get(optimizer, known) in errors[name]
    alone = dict.fromkeys(f"single_device:{name.split(':')[1]}" for name in equal)
    assert set(fitted(tmp_path, 1, *alone).values()) == {""}
    for name in equal:
        expected = weights(tmp_path / f"1-single_device-{name.split(':')[1]}")
        found_weights = weights(tmp_path / f"2-{name.replace(':', '-')}")
        assert float((found_weights - expected).abs().max()) < 1e-5, name


@pytest.mark.slow
def test_an_optimizer_that_draws_noise_steps_replicas_alike(tmp_path: Path) -> None:
    scaled = {"module": "optimizer_subject.Scaled", "init": {"optimizer": "noisy"}}
    steps = {"max_steps": 4, "global_batch_size": 4, "seed": 7, **scaled}

    def trained(ranks: int, **options: Any) -> list[torch.Tensor]:
        runs = [{"name": "ddp", "devices": ranks, **steps, **options}]
        outcomes = fits(tmp_path, runs, cwd=tmp_path, extra=at_root())
        assert outcomes == [{runs[0]["name"]: ""}] * ranks
        states = [torch.load(tmp_path / f"weights-{rank}.pt") for rank in range(ranks)]
        return [torch.cat([tensor.flatten() for tensor in state.values()]) for state in states]

    (alone,) = trained(1, name="alone")
    replicas = trained(2, strategy="ddp")
    assert torch.equal(*replicas)
    torch.testing.assert_close(replicas[0], alone, atol=1e-6, rtol=0)
    trained(2, strategy="ddp", name="parts", max_steps=2)
    for resumed in trained(2, strategy="ddp", name="parts", resume="auto"):
        assert torch.equal(resumed, replicas[0])
    shards = {"name": "shards", "devices": 2, "strategy": "fsdp", **steps}
    for fit in fits(tmp_path, [shards]):  # the scale is whole
        assert fit["shards"].startswith("Noisy.step draws random numbers")


@pytest.mark.slow
def test_gradients_of_gradients_are_right_or_refused(tmp_path: Path) -> None:
    tensor, ddp = {"strategy": "tensor_parallel"}, {"strategy": "ddp", "sync_batchnorm": True}
    runs: dict[str, dict[str, Any]] = {"alone": {"devices": 1}, "sync_batchnorm": ddp}
    runs |= {"of-another-layer": tensor, "none": tensor, "tensor": tensor}
    made = [
        {"name": name, "module": "optimizer_subject.Critic", "init": {"name": name}}
        | {"devices": 2, "global_batch_size": 4, "max_epochs": 2, **options}
        for name, options in runs.items()
    ]
    assert fits(tmp_path, made[:1]) == [{"alone": ""}]
    *trained, refused = fits(tmp_path, made[1:])[0].values()
    assert trained == [""] * 3
    (line,) = refused.splitlines()
    assert line.startswith("create_graph=True: the gradient of a gradient is not supported")
    difference = weights(tmp_path / "sync_batchnorm") - weights(tmp_path / "alone")
    assert float(difference.abs().max()) < 1e-5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.rand, random.random, None])
def test_a_draw_from_any_generator_is_noticed(monkeypatch, device, draw):
    states = iter(range(2))  # of a GPU's generator, which moves if nothing else does
    module = SimpleNamespace(get_rng_state=lambda _: torch.tensor(next(states) * (draw is None)))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    kind: Any = type("Draws", (torch.optim.SGD,), {"step": lambda _: (draw or int)()})
    where = (kind([torch.zeros(1)]), Precision("32-true", device), torch.device(device))
    engine_optimizers.step_alone(*where, lambda _: False)
    noticed = pytest.raises(UserError, match=r"Draws\.step draws random numbers")
    with noticed if draw or device == "cuda" else nullcontext():
        engine_optimizers.step_alone(*where, lambda _: True)
