"""A model whose losses, or gradients, are not finite at a planted step; named by class path."""

from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends

PLANTED = {"nan": float("nan"), "inf": float("inf")}


class Root(torch.autograd.Function):
    """A finite loss with an infinite gradient, as that of sqrt at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class Diverges(Descends, lr=1e-3):
    """Twelve steps an epoch: from ``step`` on if ``ever``, else in it, a rank's loss is not finite.

    ``what``: ``"nan"``, ``"inf"``, or ``"gradient"``: only its gradient is infinite.
    """

    def __init__(
        self,
        what: str = "nan",
        step: int = 4,
        rank: int = 0,
        manual: bool = False,
        ever: bool = False,
    ) -> None:
        super().__init__()
        self.what, self.step, self.rank, self.ever = what, step, rank, ever
        self.automatic_optimization = not manual
        self.linear = nn.Linear(1, 1)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.frozen = nn.Parameter(torch.tensor([float("-inf")]), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.linear(batch[0]).square().mean()
        step = self.global_step + 1
        if self.global_rank == self.rank and (
            step == self.step or (self.ever and step > self.step)
        ):
            loss = Root.apply(loss) if self.what == "gradient" else loss * PLANTED[self.what]
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(24, 1)), batch_size=2)


class Data(trainer.DataModule):
    """The batches of :class:`Diverges`."""

    train_dataloader = Diverges.train_dataloader
