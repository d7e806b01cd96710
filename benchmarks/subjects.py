"""What is trained: the same model, data and optimizer for every contestant."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BATCH = 8  # of each process
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
CLASSES = 10
VOCABULARY = 256
CONTEXT = 64


@dataclass(frozen=True)
class Subject:
    """A model and its data; `loss` is the whole of a training step but for backward and update."""

    net: nn.Module
    dataset: TensorDataset

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.net, x, y)

    @torch.no_grad()
    def final_loss(self) -> float:
        """Loss on the first 256 samples: shows that the contestant trained and did not just run."""
        x, y = self.dataset.tensors
        return float(self.loss(x[:256], y[:256]))


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of `net`, which may be wrapped for several processes."""
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def optimizer_for(net: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)


def build(name: str, steps_per_epoch: int) -> Subject:
    """The subject `name`, with data for `steps_per_epoch` batches on each process."""
    torch.manual_seed(0)
    samples = steps_per_epoch * BATCH * WORLD_SIZE
    return {"mlp": _mlp, "transformer": _transformer}[name](samples)


def _mlp(samples: int) -> Subject:
    """So small that what is measured is what stands around it."""
    net = nn.Sequential(
        nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )
    x = torch.randn(samples, 32)
    return Subject(net, TensorDataset(x, x[:, :CLASSES].argmax(1)))


def _transformer(samples: int) -> Subject:
    """1.9 million parameters: the size at which the model itself takes the time."""
    x = torch.randint(VOCABULARY, (samples, CONTEXT))
    return Subject(Transformer(), TensorDataset(x, (x + 1) % VOCABULARY))


class Transformer(nn.Module):
    def __init__(self, width: int = 192, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.tokens(x) + self.places))
        return logits


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return result
