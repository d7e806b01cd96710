"""Trains under strategies that average parameters; started by test_local_sgd.py.

``python -m local_sgd_worker fit RANKS FOLDER`` trains every case once through, and those with a
``stop`` once resumed in the middle of a period. ``… resume RANKS FOLDER STRATEGY…`` resumes the
checkpoint ``FOLDER/from`` under strategies.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import my_project_trainer as trainer
import torch
from my_project_trainer.loop import saving
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet
from live_storages import Live

SAMPLES, GLOBAL_BATCH = 26, 8  # four steps an epoch, the last of two samples
EPOCHS, STEPS = 3, 12


@dataclass(frozen=True)
class Case:
    """A way to train; by default SGD with momentum in double precision.

    Args:
        strategy: its name.
        options: of the strategy.
        trainer: arguments of the trainer.
        adam: instead of SGD.
        norm: a BatchNorm.
        schedule: a scheduler that steps with each step.
        manual: two networks, trained with manual optimization.
        dtype: of the parameters.
        stop: a step in the middle of a period, from which it is resumed; 0: it is not.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    adam: bool = False
    norm: bool = False
    schedule: bool = False
    manual: bool = False
    dtype: torch.dtype = torch.float64
    stop: int = 0


CLIPPED = {"gradient_clip_val": 0.3}
CASES = {
    "sgd": Case("local_sgd", {"every_n_steps": 5}, CLIPPED, norm=True, stop=4),
    "adam": Case(
        "local_sgd",
        {"every_n_steps": 4, "warmup_steps": 3},
        {"accumulate_grad_batches": 2, **CLIPPED},
        adam=True,
        schedule=True,
        stop=5,
    ),
    "diloco": Case("diloco", {"every_n_steps": 3, "warmup_steps": 1}, adam=True, stop=6),
    "diloco, sgd": Case(
        "diloco",
        {"every_n_steps": 5, "outer_learning_rate": 0.5, "outer_momentum": 0.0},
        schedule=True,
    ),
    "manual": Case("local_sgd", {"every_n_steps": 3, "warmup_steps": 2}, manual=True, stop=4),
    "bf16": Case(
        "local_sgd", {"every_n_steps": 5}, {"precision": "bf16-mixed"}, dtype=torch.float32
    ),
    "fp16": Case(
        "local_sgd",
        {"every_n_steps": 5},
        {"precision": "16-mixed", **CLIPPED},
        dtype=torch.float32,
        stop=4,
    ),
}
RESUMED = "adam"
PERIOD = CASES[RESUMED].options
# Under which, and on other numbers of ranks, its checkpoint is resumed.
RESUMES = {
    "local_sgd": ("local_sgd", PERIOD),
    "diloco": ("diloco", PERIOD),
    "ddp": ("ddp", {}),
}


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, torch.stack([x.sum(1), x.prod(1)], dim=1)


class Subject(trainer.TrainingModule):
    """Two layers; notes what each step reads.

    Two parameters have no gradient: one is infinite, the other follows one that is trained.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = not case.manual
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        # Over pairs of features, so that a single sample can be normalized.
        pairs = (nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten())
        self.norm = nn.Sequential(*pairs if case.norm else ())
        self.last = nn.Linear(8, 2)
        for parameter in (*self.first.parameters(), *self.last.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
        self.frozen = nn.Parameter(torch.tensor([0.1, -torch.inf]), requires_grad=False)
        self.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.to(case.dtype)
        self.reads: list[tuple[int, list[int], int]] = []
        self.storages: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """One loss, or in manual optimization one for each optimizer."""
        hidden = self.first(x)
        if self.case.manual:
            return [mse_loss(hidden[:, :2], y), mse_loss(self.last(hidden.detach()), y)]
        return [mse_loss(self.last(self.norm(hidden)), y)]

    def teach(self) -> None:
        """Have the teacher follow the last layer's bias."""
        self.teacher.data.lerp_(self.last.bias.data, 0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        index, x, y = batch
        self.reads.append((self.trainer.global_step, index.tolist(), self.trainer.batch_samples))
        losses = self.losses(x, y)
        self.teach()
        if not self.case.manual:
            return losses[0]
        for loss, optimizer in zip(losses, self.optimizers(), strict=True):
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x, y = batch
        self.log("val_loss", self.losses(x, y)[0])

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """One, or in manual optimization one for each half."""
        if self.case.manual:
            sgd = torch.optim.SGD(self.first.parameters(), lr=0.05, momentum=0.9)
            return [sgd, torch.optim.Adam(self.last.parameters(), lr=0.02)]
        if self.case.adam:
            return [torch.optim.Adam(self.parameters(), lr=0.02)]
        return [torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)]

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Steps with each step."""
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def configure_optimizers(self) -> Any:
        optimizers = self.make_optimizers()
        if not self.case.schedule:
            return optimizers
        scheduler = {"scheduler": self.make_scheduler(optimizers[0]), "interval": "step"}
        return optimizers, [scheduler]

    def train_dataloader(self) -> Any:
        x, y = (each.to(self.case.dtype) for each in data())
        return DataLoader(TensorDataset(torch.arange(SAMPLES), x, y), batch_size=1)

    val_dataloader = train_dataloader


def fit(case: Case, folder: Path, devices: int, **arguments: Any) -> tuple[Subject, Any]:
    """Train, with a checkpoint and a validation after each step."""
    run = quiet(
        **{
            "strategy": case.strategy,
            "strategy_options": dict(case.options),
            "devices": devices,
            "max_epochs": EPOCHS,
            "global_batch_size": GLOBAL_BATCH,
            "checkpoint_every_n_steps": 1,
            "keep_checkpoints": 100,
            "val_every_n_steps": 1,
            "loggers": ["csv"],
            "log_every_n_steps": 1,
            "default_root_dir": folder,
            **case.trainer,
            **arguments,
        }
    )
    subject = Subject(case)
    with mock.patch.object(saving, "state", partial(counted_state, saving.state, subject)):
        run.fit(subject)
    return subject, run


def counted_state(state: Callable[..., Any], subject: Subject, fit: Any) -> Any:
    """What a checkpoint contains; note the bytes that it takes, and those that it took at most."""
    with Live() as live:
        live.begin()
        found = state(fit)
        subject.storages.append((live.added(), live.most))
    return found


def write(subject: Subject, run: Any, folder: Path, name: str) -> None:
    """Write what this rank holds, and what it has read."""
    path = folder / f"{name}.{run.global_rank}"
    state = {key: value.tolist() for key, value in subject.state_dict().items()}
    found = {"state": state, "reads": subject.reads, "storages": subject.storages}
    path.write_text(json.dumps(found))


def short(name: str) -> str:
    """The name of a case's run."""
    return name.replace(", ", "-").replace(" ", "-")


def fit_all(ranks: int, folder: Path) -> None:
    """Train each case; those that are resumed stop in the middle of a period first."""
    for name, case in CASES.items():
        run_name = short(name)
        write(*fit(case, folder, ranks, run_name=run_name), folder, name)
        if case.stop:
            stop = {"max_steps": case.stop, "run_name": f"{run_name}-stopped"}
            _, stopped = fit(case, folder, ranks, **stop)
            resume = {"resume": str(stopped.run_directory), "run_name": f"{run_name}-resumed"}
            write(*fit(case, folder, ranks, **resume), folder, f"{name}, resumed")


def resume_all(ranks: int, folder: Path, names: list[str]) -> None:
    """Resume one checkpoint under strategies, until the period in which it was saved has ended."""
    case = CASES[RESUMED]
    for name in names:
        strategy, options = RESUMES[name]
        resumed = replace(case, strategy=strategy, options=options)
        how = {"resume": str(folder / "from"), "max_steps": case.stop + 2, "run_name": name}
        write(*fit(resumed, folder, ranks, **how), folder, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, count, where, *rest = sys.argv[1:]
    if command == "fit":
        fit_all(int(count), Path(where))
    else:
        resume_all(int(count), Path(where), rest)
