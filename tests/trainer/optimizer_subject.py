"""Optimizers whose parameters, or parts of them, are stepped by several processes, with models."""

import random
from collections.abc import Iterator
from typing import Any

import my_project_trainer as trainer
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset


class Own(torch.optim.Optimizer):
    """An optimizer that torch does not have."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def reached(self) -> Iterator[tuple[float, Any]]:
        """The parameters that have gradients, with the rates of their groups."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group["lr"], parameter


class Lars(Own):
    """A step is in proportion to the norm of its parameter."""

    is_parameterwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for rate, parameter in self.reached():
            parameter.sub_(rate * parameter.norm() / parameter.grad.norm() * parameter.grad)


class Lamb(Lars):
    """Clips the gradients of all parameters together, as timm's does."""

    is_elementwise = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in self.reached()], 0.1)
        for rate, parameter in self.reached():
            parameter.sub_(rate * parameter.grad)


class Marked(Lamb):
    is_elementwise = True


class Lion(Own):
    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for rate, parameter in self.reached():
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            parameter.sub_(rate * torch.sign(0.9 * mean + 0.1 * parameter.grad))
            mean.lerp_(parameter.grad, 0.01)


class Unknown(Lion):
    """Its own step, of which it says nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.norm())


class Early(Lion):
    """Has a state before its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.zeros_like(parameter)


class Wraps(torch.optim.SGD):
    """Steps with the parameter groups of another one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, lr=0.01)


class Mixes(torch.optim.SGD):
    """Cannot step DTensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(torch.ones(parameter.shape) * parameter)


class Set(Lion):
    """Has settings beside its groups, which a schedule changes too, and the state of another."""

    is_elementwise = True

    def __init__(self, parameters: Any, lr: float = 0.01, made: Any = None) -> None:
        super().__init__(parameters, lr)
        self.sign, self.scale = made or (None, None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for rate, parameter in self.reached():
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            parameter.sub_(rate * self.param_groups[0].get("faster", 1.0) * self.sign(mean))
            mean.add_(parameter.grad, alpha=self.scale[0].item())


def set_up(parameters: Any) -> Any:
    made = Set(parameters, made=(torch.tanh, [torch.tensor(0.5)]))
    other = Model("set").parameters()
    of_other = {index: {"mean": torch.full_like(p, 0.25)} for index, p in enumerate(other)}
    made.load_state_dict(made.state_dict() | {"state": of_other})

    def faster(step: int) -> float:
        return float(made.param_groups[0].update(faster=1.0 + step) is None)

    schedule = torch.optim.lr_scheduler.LambdaLR(made, faster)
    return [made], [{"scheduler": schedule, "interval": "step"}]


class Noisy(Own):
    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for rate, parameter in self.reached():
            parameter.sub_(rate * (parameter.grad + torch.randn_like(parameter)))
            parameter.sub_(0.01 * random.random() + 0.01 * float(np.random.rand()))


OPTIMIZERS: dict[str, Any] = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "adagrad": lambda given: torch.optim.Adagrad([{"params": p, "lr": 0.02} for p in given], lr=1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "early": Early,
    "lamb": Lamb,
    "lars": Lars,
    "lion": Lion,
    "marked": Marked,
    "mixes": lambda parameters: Mixes(parameters, lr=0.01),
    "noisy": lambda parameters: Noisy(parameters, lr=0.1),
    "saves": type("Saves", (Lion,), {"state_dict": lambda self: Lion.state_dict(self) | {"n": 3}}),
    "set": set_up,
    "unknown": Unknown,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "wraps": lambda parameters: Wraps(torch.optim.SGD(parameters)),
}


class Model(trainer.TrainingModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.optimizer = optimizer
        self.sequential_module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.sequential_module(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self) -> Any:
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x))


class Scaled(Model):
    """Has a scale without dimensions, and draws numbers as dropout does."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = torch.rand(1) * 0  # moves the generator of this rank
        return self.scale * super().training_step(batch, batch_idx) + drawn.sum()

    def on_fit_end(self) -> None:
        torch.save(self.state_dict(), f"weights-{self.global_rank}.pt")


class Critic(Model):
    """A gradient penalty: its loss has the gradient of a gradient."""

    parallelize_plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        super().__init__("sgd")
        del self.sequential_module
        self.name = name
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        hidden = self.first(x).tanh()
        if self.name in ("alone", "sync_batchnorm"):
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        y = self.down(self.up(hidden).tanh())
        loss = y.square().mean()
        if self.name.endswith("none"):
            return loss
        penalized = hidden if "another" in self.name else y
        (slope,) = torch.autograd.grad(penalized.square().sum(), x, create_graph=True)
        return loss + slope.square().mean()

    def train_dataloader(self) -> Any:
        x = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x))
