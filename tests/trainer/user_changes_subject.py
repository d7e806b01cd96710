"""Fits whose hooks change weights or gradients. Arguments: ``FOLDER RUNS``.

Runs are a dict in JSON: options of the trainer by ``NAME`` of a class here, or ``NAME ANYTHING``.
"""

import copy
import itertools
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import TrainingModule, UserError
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, StepsByHand, fit, saved


class Plain(Descends, lr=0.1, momentum=0.5):
    """Two layers of a chain, a head, and a teacher of the head that is not trained."""

    parallelize_plan = {  # noqa: RUF012
        "sequential_module.0": ColwiseParallel(),
        "sequential_module.2": RowwiseParallel(),
    }

    head_class = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.sequential_module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = self.head_class(4, 2)
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(2, 4).t())  # not contiguous

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.sequential_module(batch[0])
        output, taught = self.head(features) + features @ self.turned, self.teacher(features)
        return (output - batch[1]).square().mean() + functional.mse_loss(output, taught.detach())

    def train_dataloader(self) -> DataLoader[Any]:
        torch.manual_seed(5)
        return DataLoader(TensorDataset(torch.randn(24, 5), torch.randn(24, 2)), batch_size=4)


class Clamp(Plain):
    def on_after_optimizer_step(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class ShrinkAfterEpoch(Plain):
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.data *= 0.5


class ShrinkHeadInStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.head.weight.data *= 0.9
        return super().training_step(batch, batch_idx)


class Constrained(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.2)
        return super().forward(inputs)


class HalvesHeadInStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.sequential_module(batch[0])
        halves = {name: parameter / 2 for name, parameter in self.head.named_parameters()}
        output = functional_call(self.head, halves, features) + features @ self.turned
        return (output - batch[1]).square().mean()


class Teacher(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            teacher.data.lerp_(student.data, 0.25)


class TeacherOfAll(Plain):
    def on_after_optimizer_step(self) -> None:
        means = [self.sequential_module[index].weight.data.mean() for index in (0, 2)]
        self.teacher.weight.data.add_(means[0] + means[1], alpha=0.1)


class ClipNorm(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipValue(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.02)


class OptionsOnly(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx) / self.count


class Prunes(Plain):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.sequential_module[0], "weight", 0.5)


class KeepsFeatures(Plain):
    def __init__(self, by_function: bool = False) -> None:
        super().__init__()
        self.features = torch.zeros(1)
        hook = (lambda _, __, x: setattr(self, "features", x)) if by_function else self.keep
        self.sequential_module.register_forward_hook(hook)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features = output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.features.square().mean()


class ClampValidated(Plain):
    """Stage 3 frees weights in a step that is not like the one before, as after a validation."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.25, 0.25)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class NoGradient(Plain):
    """As DINO does with its last layer."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step < 2:
            for parameter in self.sequential_module[2].parameters():
                parameter.grad = None


class OwnOptimizer(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = super().configure_optimizers()
        return self.optimizer

    def on_train_epoch_start(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (2 + self.current_epoch)


class ClampGroups(OwnOptimizer):
    @torch.no_grad()
    def on_after_optimizer_step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.2, 0.2)


class ResetsState(OwnOptimizer):
    def on_train_epoch_start(self) -> None:
        self.optimizer.state.clear()


class AddsGroup(OwnOptimizer):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.sequential_module.parameters(), 0.1, momentum=0.5)
        return self.optimizer

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizer.add_param_group({"params": [self.head.weight], "lr": 0.2})


class FreezesHead(Plain):
    """Trained in the first epoch only, and its bias in the second only."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.head.bias.requires_grad_(False)
        return super().configure_optimizers()

    def on_train_epoch_start(self) -> None:
        self.head.weight.requires_grad_(self.current_epoch == 0)
        self.head.bias.requires_grad_(self.current_epoch == 1)


class Anchored(torch.optim.SGD):
    """Keeps its weights near the first ones, which it knows by their places."""

    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.1, pull: float = 0.9) -> None:
        super().__init__(params, lr)
        self.pull, self.last = pull, dict[Tensor, Any]()
        groups = [group["params"] for group in self.param_groups]
        self.start = [[p.detach().clone() for p in tensors] for tensors in groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group, start in zip(self.param_groups, self.start, strict=False):
            for parameter, first in zip(group["params"], start, strict=False):
                parameter.add_(self.last.get(parameter, 0.0), alpha=0.05)
                self.last[parameter] = parameter.grad
                parameter.data = torch.lerp(parameter, first, self.pull)


class Anchors(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Anchored([weight for weight in self.parameters() if weight.requires_grad], pull=0.3)


class ClipGroups(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.01, 0.01)


class HalvesByData(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.sequential_module.parameters():
            parameter.grad.data = parameter.grad.data / 2


class MasksRow(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for index in (0, 2):
            self.sequential_module[index].weight.grad[:2] = 0


class KeepsParameters(Plain):
    """A list of parameters, and an attribute of one, from the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.clamped = {"all": [weight for weight in self.parameters() if weight.ndim == 2]}
        self.head.weight.decays = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decays: dict[bool, list[Any]] = {True: [], False: []}
        for parameter in self.parameters():
            decays[getattr(parameter, "decays", True)].append(parameter)
        groups = [{"params": group, "weight_decay": 0.5 * decay} for decay, group in decays.items()]
        return torch.optim.SGD(groups, 0.1)

    @torch.no_grad()
    def on_after_optimizer_step(self) -> None:
        for parameter in self.clamped["all"]:
            parameter.clamp_(-0.25, 0.25)


class HooksGradient(Plain):
    def __init__(self) -> None:
        super().__init__()
        calls = itertools.count(1)  # one for each backward
        self.sequential_module[0].weight.register_hook(lambda gradient: gradient / next(calls))


class ReadsNorms(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = sum(weight.grad.norm().item() for weight in self.sequential_module.parameters())
        self.log("norm", norm)


class CreatesHead(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.other = nn.Linear(4, 2)
        return super().configure_optimizers()


class Attends(Plain):
    """torch's encoder with a mask, whose fast path in evaluation is another one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.zeros(len(batch[0]), 2, dtype=torch.bool)
        mask[1:, 1] = True
        encoded = self.encoder(batch[0][:, :4].unsqueeze(1).expand(-1, 2, -1), None, mask)
        return super().training_step(batch, batch_idx) + encoded[:, 0, 0].square().mean()

    validation_step = ClampValidated.validation_step
    val_dataloader = ClampValidated.val_dataloader


class TrainsChainLater(Plain):
    def on_train_epoch_start(self) -> None:
        self.sequential_module.requires_grad_(self.current_epoch > 0)


class Reentrant(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.sequential_module(batch[0]).requires_grad_()
        for _ in range(2):
            x = checkpoint(self.sequential_module[2], x, use_reentrant=True)
        return (self.head(x) + x @ self.turned - batch[1]).square().mean()


class ReentrantByHand(StepsByHand, Reentrant): ...


class Penalty(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        norms = (parameter.square().sum() for parameter in self.sequential_module.parameters())
        return super().training_step(batch, batch_idx) + 0.1 * sum(norms)


class Two(nn.Linear):
    """Gives a tensor and one that the last child does not use; in between, what is detached."""

    def __init__(self, detaches: bool = False) -> None:
        super().__init__(5, 5)
        self.detaches, self.beside = detaches, nn.Linear(5, 5)

    def forward(self, inputs: Any) -> tuple[Tensor, Tensor]:
        x = inputs[0] if isinstance(inputs, tuple) else inputs
        x = x.detach() if self.detaches else x
        return super().forward(x).tanh(), self.beside(x)


class PartlyUsed(Plain, by=torch.optim.AdamW, lr=0.1, weight_decay=0.5):
    """Some parameters have no gradient, which the optimizer leaves as they are."""

    def __init__(self, detaching: int | None = None) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(Two(number == detaching) for number in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.sequential_module(batch[0])[0][:, :2] - batch[1]).square().mean()


KeepsByFunction = partial(KeepsFeatures, by_function=True)
UsedAfterDetach = partial(PartlyUsed, detaching=2)
ConstrainsHead = type("ConstrainsHead", (Plain,), {"head_class": Constrained})
CallsLater = type("CallsLater", (Plain,), {"after_fit": lambda m: m.head(torch.ones(1, 4))})
ReadsLater = type("ReadsLater", (Plain,), {"after_fit": lambda m: float(m.head.weight.sum())})


def fitted(module: TrainingModule, folder: Path, options: dict[str, Any]) -> float | str:
    """The sum of the absolute weights after a fit, or the error that ended it."""
    shared = {"devices": "auto", "max_epochs": 2, "global_batch_size": 8, "seed": 7}
    try:
        fit(module, folder, **shared | options)
        getattr(module, "after_fit", dict)()
    except UserError as error:
        print(error, flush=True)
        return str(error)
    return float(sum(weight.double().abs().sum() for weight in saved(folder / "run").values()))


if __name__ == "__main__":
    folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    kinds = {name: globals()[name.partition(" ")[0]] for name in runs}
    losses = {name: fitted(kinds[name](), folder / name, runs[name]) for name in runs}
    if int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))) == 0:
        (folder / "found.json").write_text(json.dumps(losses))
