"""What is trained on the GPU and, for comparison, on the CPU: small models on made-up data."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import my_project_trainer as trainer

FEATURES = 16
LENGTH = 8
HEADS = 4
BATCH = 16
SAMPLES = 16 * 16


class Block(nn.Module):
    """Attention and two linear layers, each beside a shortcut."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(gelu(self.up(self.norm_2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS)
        attended = scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Sequences(trainer.TrainingModule):
    """A transformer on random sequences.

    Args:
        optimizer: ``"sgd"``, ``"adamw"`` or ``"fused"`` (AdamW in one kernel).
        dropout: share of activations.
        width, depth: of the transformer.
    """

    def __init__(
        self, optimizer: str = "sgd", dropout: float = 0.0, width: int = 64, depth: int = 2
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        # Created on the CPU: the same numbers whatever is trained on.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first = nn.Linear(FEATURES, width)
            self.sequential_module = nn.Sequential(*(Block(width, dropout) for _ in range(depth)))
            self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.sequential_module(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        # Small, so that no gradient overflows that "16-mixed" scales: that would leave a step out.
        loss = mse_loss(self(x), y) / 20
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=2.0, momentum=0.9)
        fused = self.optimizer == "fused"
        # A small eps would make whole steps of the rounding of gradients that are almost 0.
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3, fused=fused)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(SAMPLES, LENGTH, FEATURES, generator=generator)
        y = torch.stack([x.sum(2), x[..., 0] * x[..., 1], x[..., 2], x.mean(2)], dim=2)
        return DataLoader(TensorDataset(x, y), batch_size=BATCH)
