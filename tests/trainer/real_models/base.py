"""What all models share: the data, and SGD."""

from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS = 4
GLOBAL_BATCH = 8


class Base(trainer.TrainingModule):
    """Trains on made-up samples with SGD.

    A model adds :meth:`sample` and :meth:`loss`, or a ``training_step``.
    """

    rate = 0.05
    options: dict[str, Any] = {}  # noqa: RUF012
    collate: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)

    def sample(self, generator: torch.Generator) -> Any:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        """The mean loss of the samples of a batch."""
        raise NotImplementedError

    def samples(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        return [self.sample(generator) for _ in range(STEPS * GLOBAL_BATCH)]

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples(), batch_size=GLOBAL_BATCH, collate_fn=self.collate)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.rate, momentum=0.9)


class Manual(Base):
    """Two networks with an optimizer each."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        networks = self.children()
        return [torch.optim.SGD(net.parameters(), lr=self.rate, momentum=0.9) for net in networks]


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))
