"""What the memory benchmark trains: a GPT of 100.7 million parameters on few, made-up tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from my_project_trainer import TrainingModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# A batch of 16 tokens: activations are small beside parameters, and a step is short.
VOCABULARY = 16
CONTEXT = 16


@dataclass(frozen=True)
class Size:
    """Of a model: features of a token, and blocks."""

    width: int
    depth: int

    @property
    def parameters(self) -> int:
        """Numbers in the model."""
        block = 12 * self.width**2 + 4 * self.width
        return self.depth * block + (2 + 2 * VOCABULARY + CONTEXT) * self.width


SIZE = Size(width=1024, depth=8)
QUICK = Size(width=256, depth=4)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Sequences drawn by their index; each target is the token, plus one.

    Args:
        samples: how many.
        fetched: called before each is made. A rank reads one a step, so that this is after a
            step's gradients were freed and before the next forward.
    """

    def __init__(self, samples: int, fetched: Callable[[], None]) -> None:
        self.samples, self.fetched = samples, fetched

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched()
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (CONTEXT,), generator=generator)
        return tokens, (tokens + 1) % VOCABULARY


class GPT(TrainingModule):
    """A transformer of the usual form, without biases but those of its norms.

    Args:
        size: of the model.
        loader: of training batches.
    """

    def __init__(self, size: Size, loader: Callable[[], DataLoader[Any]]) -> None:
        super().__init__()
        self.loader = loader
        self.losses: list[float] = []
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(CONTEXT, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-5)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader()


class Block(nn.Module):
    """Attention and a network of two layers, each beside a short cut."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
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
