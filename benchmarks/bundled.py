"""The rendered project's trainer: bare, with a CSV logger, its defaults, and all of its numbers."""

from __future__ import annotations

from typing import Any

import torch
from my_project_trainer import Callback, Trainer, TrainingModule
from my_project_trainer.callbacks.measuring import SystemMonitor
from torch import Tensor
from torch.utils.data import DataLoader

from meter import Job, Meter
from subjects import BATCH, WORLD_SIZE, Subject, build, optimizer_for


class Counter(Callback):
    """A callback of a user, called in every step."""

    count = 0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.count += 1


class Module(TrainingModule):
    def __init__(self, job: Job, meter: Meter, subject: Subject) -> None:
        super().__init__()
        self.job, self.meter, self.subject = job, meter, subject
        self.net = subject.net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.meter.tick()
        x, y = batch
        loss = self.subject.loss(x, y)
        if self.job.variant != "bare":
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self.net, self.job.fused)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.subject.dataset, batch_size=BATCH, shuffle=True)


class CountingModule(Module):
    """Says what tokens and operations there are."""

    def __init__(self, job: Job, meter: Meter, subject: Subject) -> None:
        super().__init__(job, meter, subject)
        self.flops_per_sample = 6.0 * sum(each.numel() for each in subject.net.parameters())

    def count_tokens(self, batch: list[Tensor]) -> int:
        return batch[0].numel()


def run(job: Job, meter: Meter) -> Subject:
    subject = build(job.subject, job.epoch)
    variants: dict[str, dict[str, Any]] = {
        # It saves at the end of every epoch in any case: there is no switch for that.
        "bare": {"loggers": [], "enable_progress_bar": False},
        "logging": {"loggers": ["csv"], "enable_progress_bar": False},
        "everything": {},
        "numbers": {
            "callbacks": [Counter(), SystemMonitor()],
            "log_gradient_norm": True,
            "peak_flops": 1e11,
        },
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_steps=job.total,
        log_every_n_steps=50,
        **variants[job.variant],
    )
    kind = CountingModule if job.variant == "numbers" else Module
    trainer.fit(kind(job, meter, subject))
    return subject
