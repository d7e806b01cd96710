"""What every strategy trains here: a small network on made-up data, one variation a property."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ..project import trainer

SAMPLES = 101  # divides by nothing: the last batch of an epoch is uneven on any number of processes
GLOBAL_BATCH = 24


class Subject(trainer.TrainingModule):
    """Two hidden layers; parameters and data are the same in every process.

    Args:
        optimizer: ``"sgd"``, ``"adam"``, or ``"two"`` (SGD for one half, Adam for the other).
        schedule: step a scheduler after each step.
        drop_last: leave out the uneven batch.
        scale: of weights and targets.
    """

    def __init__(
        self,
        optimizer: str = "sgd",
        schedule: bool = False,
        drop_last: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.optimizer, self.schedule, self.drop_last = optimizer, schedule, drop_last
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4 * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "two":
            return [
                torch.optim.SGD(self.first.parameters(), lr=0.05, momentum=0.9),
                torch.optim.Adam(self.second.parameters(), lr=0.01),
            ]
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.schedule:
            return sgd
        scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.8)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(SAMPLES, 6, generator=generator)
        y = torch.stack([x.sum(1), x.prod(1), x[:, 0] * x[:, 1]], dim=1)
        return DataLoader(TensorDataset(x, y * self.scale), batch_size=8, drop_last=self.drop_last)
