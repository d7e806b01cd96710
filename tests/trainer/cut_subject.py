"""Optimizers whose parameters, or parts of them, are stepped by several processes.

``python -m cut_subject FOLDER DEVICES STRATEGY:OPTIMIZER …`` fits once for each, and prints the
error, if it is refused.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet


class Lars(torch.optim.Optimizer):
    """A step is in proportion to the norm of its parameter."""

    is_parameterwise = True

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.norm() / each.grad.norm() * each.grad)


class Lamb(Lars):
    """Clips the gradients of all parameters together, as timm's does."""

    is_elementwise = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = [each for group in self.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(own, 0.1)
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.grad)


class Marked(Lamb):
    is_elementwise = True


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have."""

    is_elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                    each.sub_(group["lr"] * torch.sign(0.9 * mean + 0.1 * each.grad))
                    mean.lerp_(each.grad, 0.01)


class Unknown(Lion):
    """Its own step, of which it says nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            each.sub_(each.grad / each.grad.norm())


class Early(Lion):
    """Has a state before its first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["mean"] = torch.zeros_like(each)


class Wraps(torch.optim.SGD):
    """Steps with the parameter groups of another one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, lr=0.01)


class Mixes(torch.optim.SGD):
    """Cannot step DTensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.copy_(torch.ones(each.shape) * each)


OPTIMIZERS: dict[str, Any] = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "early": lambda parameters: Early(parameters, lr=0.01),
    "lamb": Lamb,
    "lars": Lars,
    "lion": lambda parameters: Lion(parameters, lr=0.01),
    "marked": Marked,
    "mixes": lambda parameters: Mixes(parameters, lr=0.01),
    "unknown": lambda parameters: Unknown(parameters, lr=0.01),
    "wraps": lambda parameters: Wraps(torch.optim.SGD(parameters)),
}


class Model(trainer.TrainingModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.sequential_module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.sequential_module(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self) -> Any:
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x))


def main(folder: Path, devices: int, names: list[str]) -> None:
    for name in names:
        strategy, optimizer = name.split(":")
        torch.manual_seed(1)
        module = Model(optimizer)
        where = {"default_root_dir": folder, "run_name": f"{devices}-{strategy}-{optimizer}"}
        limits = {"global_batch_size": 4, "max_steps": 4}
        tell_end(name, quiet(devices=devices, strategy=strategy, **limits, **where), module)


def tell_end(name: str, run: trainer.Trainer, module: trainer.TrainingModule) -> None:
    """Fit; rank 0 prints the error, or ``""`` after a fit that trains."""
    found = ""
    try:
        run.fit(module)
    except trainer.UserError as error:
        found = str(error)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
