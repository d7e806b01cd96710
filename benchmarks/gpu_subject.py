"""What the GPU benchmark trains: a GPT of 124 million parameters; and the clock of a step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import memory_meter
from gpu_job import Job

CLIP = 1.0


class Block(nn.Module):
    """Attention and a network of two layers, each beside a shortcut."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads = job.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(job.width), nn.LayerNorm(job.width)
        self.qkv = nn.Linear(job.width, 3 * job.width)
        self.out = nn.Linear(job.width, job.width)
        self.up, self.down = (
            nn.Linear(job.width, 4 * job.width),
            nn.Linear(4 * job.width, job.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return result


class GPT(nn.Module):
    """A transformer whose last layer shares the weights of its first, as GPT-2's does."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = nn.Embedding(job.vocabulary, job.width)
        self.places = nn.Embedding(job.context, job.width)
        self.blocks = nn.ModuleList(Block(job) for _ in range(job.depth))
        self.norm = nn.LayerNorm(job.width)
        for each in (self.tokens, self.places):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(job: Job) -> GPT:
    """Return the model, with the same weights each time, on the CPU."""
    torch.manual_seed(0)
    return GPT(job)


def loader(job: Job) -> DataLoader[Any]:
    """Return batches for all steps; the loader is the same for all contestants."""
    generator = torch.Generator().manual_seed(1)
    shape = (job.total * job.batch, job.context)
    x = torch.randint(job.vocabulary, shape, generator=generator)
    data = TensorDataset(x, (x + 1) % job.vocabulary)
    return DataLoader(data, batch_size=job.batch, shuffle=True, pin_memory=job.device == "cuda")


def optimizer_for(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)


class Clock:
    """`tick` is called first in every step; it waits for the device where the window ends."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.count = 0
        self.loss: Tensor | None = None
        self._began = self._ended = 0.0
        self._peak = 0.0

    def tick(self) -> None:
        if self.count == self.job.warmup:
            self._synchronize()
            self._forget_peak()
            self._began = time.perf_counter()
        self.count += 1
        if self.count == self.job.total:
            self._synchronize()
            self._ended = time.perf_counter()
            self._peak = self._read_peak()

    def result(self) -> dict[str, float]:
        if self.count != self.job.total or self.loss is None:
            raise SystemExit(f"{self.count} steps were run, not {self.job.total}")
        step = (self._ended - self._began) / self.job.steps
        return {"step_ms": step * 1e3, "peak_mib": self._peak, "loss": float(self.loss)}

    def _synchronize(self) -> None:
        if self.job.device == "cuda":
            torch.cuda.synchronize()

    def _forget_peak(self) -> None:
        if self.job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            memory_meter.forget_peak()

    def _read_peak(self) -> float:
        if self.job.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return memory_meter.peak()
