"""Hugging Face Accelerate: a hand-written loop with its `prepare` and `backward`."""

from __future__ import annotations

from accelerate import Accelerator  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from meter import Job, Meter
from subjects import BATCH, Subject, build, loss_of, optimizer_for


def run(job: Job, meter: Meter) -> Subject:
    accelerator = Accelerator(cpu=True)
    subject = build(job.subject, job.epoch)
    net, optimizer, loader = accelerator.prepare(
        subject.net,
        optimizer_for(subject.net, job.fused),
        DataLoader(subject.dataset, batch_size=BATCH, shuffle=True),
    )

    net.train()
    step = 0
    while step < job.total:
        for x, y in loader:
            meter.tick()
            optimizer.zero_grad()
            accelerator.backward(loss_of(net, x, y))
            optimizer.step()
            step += 1
            if step == job.total:
                break
    return subject
