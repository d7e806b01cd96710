"""The trainer of the rendered project: bare, with a CSV logger, and with all that it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from meter import Job, Meter
from my_project.trainer import Trainer, TrainingModule
from subjects import BATCH, WORLD_SIZE, Subject, build, optimizer_for


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


def run(job: Job, meter: Meter) -> Subject:
    subject = build(job.subject, job.epoch)
    variants: dict[str, dict[str, Any]] = {
        # It saves at the end of every epoch in any case: there is no switch for that.
        "bare": {"loggers": [], "enable_progress_bar": False},
        "logging": {"loggers": ["csv"], "enable_progress_bar": False},
        "everything": {},
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_steps=job.total,
        log_every_n_steps=50,
        **variants[job.variant],
    )
    trainer.fit(Module(job, meter, subject))
    return subject
