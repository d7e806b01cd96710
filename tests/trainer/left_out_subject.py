"""A frozen network with an adapter, whose checkpoints leave the network out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends

WIDTH, STEPS = 128, 6


class Adapted(Descends, by=torch.optim.AdamW, lr=0.01):
    """The adapter starts as nothing, as that of LoRA."""

    def __init__(self, base: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.1, generator=generator)
            nn.init.zeros_(layer.bias)
        self.sequential_module = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        for frozen in layers[:-1]:
            frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.sequential_module(batch[0]).square().mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(8 * STEPS, WIDTH, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(data), batch_size=4)

    test_dataloader = train_dataloader


class Teacher(Adapted):
    """A frozen layer follows a trained one, as a teacher does, and another is trained once."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sequential_module[1].requires_grad_(batch_idx == 1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        teacher, student = self.sequential_module[0], self.sequential_module[3]
        for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)
