"""One contestant's measurement in a fresh process; its last line is JSON.

python benchmarks/gpu_one.py bundled '{"device": "cuda"}'
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpu_job import LIGHTNING, MARK, PRECISION, Job, lightning_name
from gpu_subject import CLIP, Clock, build, loader, optimizer_for


def loop(job: Job, clock: Clock, *, is_compiled: bool = False) -> None:
    """Train by a hand-written loop: nothing but what training needs."""
    net = build(job).to(job.device)
    optimizer = optimizer_for(net)
    net.train()
    if is_compiled:
        net.compile()
    for batch in loader(job):
        clock.tick()
        tokens, targets = (each.to(job.device, non_blocking=True) for each in batch)
        with torch.autocast(job.device, torch.bfloat16):
            loss = net(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.loss = loss.detach()


def bundled(job: Job, clock: Clock, **options: Any) -> None:
    """Train by the rendered project's trainer."""
    from my_project_trainer import Trainer, TrainingModule

    trainer = Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=1,
        precision=PRECISION,
        gradient_clip_val=CLIP,
        max_steps=job.total,
        loggers=[],
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(_module(TrainingModule, job, clock))


def lightning(job: Job, clock: Clock) -> None:
    """Train by Lightning, without what it saves, logs and shows."""
    package: Any = importlib.import_module(lightning_name() or LIGHTNING[0])
    trainer = package.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=1,
        precision=PRECISION,
        gradient_clip_val=CLIP,
        max_steps=job.total,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    class Clipping(package.LightningModule):  # type: ignore[misc]
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            """Clip here: Lightning's own way refuses fused optimizers in half precision."""
            nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)

    trainer.fit(_module(Clipping, job, clock))


def _module(base: Any, job: Job, clock: Clock) -> Any:
    """Return the model as a module of a trainer; both trainers ask for the same methods."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = build(job)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            clock.tick()
            loss: Tensor = self.net(*batch)
            clock.loss = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_for(self.net)

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(job)

    return Module()


CONTESTANTS: dict[str, Callable[[Job, Clock], None]] = {
    "loop": loop,
    "bundled": bundled,
    "bundled_fsdp": partial(bundled, strategy="fsdp"),
    "lightning": lightning,
    "loop_compiled": partial(loop, is_compiled=True),
    "bundled_compiled": partial(bundled, compile=True),
}


def main(contestant: str, given: str) -> None:
    job = Job(**json.loads(given))
    if job.device == "cpu":
        torch.set_num_threads(1)
    # What the trainer sets by itself is the same for all.
    torch.set_float32_matmul_precision("high")
    clock = Clock(job)
    CONTESTANTS[contestant](job, clock)
    print(f"\n{MARK}{json.dumps(clock.result())}", flush=True)
    # What a framework does at exit is not measured, and must not cost the line above.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
