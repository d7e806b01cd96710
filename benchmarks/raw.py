"""A hand-written loop: nothing but what training needs. The measure of all others."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from meter import Job, Meter
from subjects import BATCH, WORLD_SIZE, Subject, build, loss_of, optimizer_for


def run(job: Job, meter: Meter) -> Subject:
    subject = build(job.subject, job.epoch)
    net: nn.Module = subject.net
    sampler: DistributedSampler[object] | None = None
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(net)
        sampler = DistributedSampler(subject.dataset)
    loader = DataLoader(subject.dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
    optimizer = optimizer_for(net, job.fused)

    net.train()
    step, epoch = 0, 0
    while step < job.total:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            meter.tick()
            optimizer.zero_grad()
            loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step == job.total:
                break
        epoch += 1
    return subject
