"""Steps of two ranks whose gradients overflow on one, share memory, or reach no parameter."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from fitting import Descends

# Half precision rounds the input to 1, and has room for the factor times the scale of losses.
INPUT, FACTOR = 1.0 + 2.0**-12, 2.0**-4


class Steps(Descends, lr=1.0):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(6, 2))  # type: ignore[arg-type]


class Overflows(Steps):
    """The last element of the last parameter overflows in the second step, on the rank of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.last.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dtype = self.first.weight.dtype  # half precision where units are gathered in it
        inputs = torch.full((1, 8), INPUT, dtype=dtype)
        with torch.autocast("cpu", enabled=False):
            loss = self.first(inputs) + self.last(inputs)
            if batch_idx == 1:
                last = torch.zeros(1, 8, dtype=dtype)
                last[0, -1] = 1e38 if dtype == torch.float32 else 32.0
                loss = loss + self.last(last)
        return loss.float().sum() * FACTOR


class Views(Steps):
    """The gradient of the view of a bias is that of the layer's output, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(2, 2, bias=False), nn.Parameter(torch.zeros(2))
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layer(torch.tensor([[1.0, 2.0]])) + self.bias.view(1, 2)
        return (output * torch.tensor([[3.0, 5.0]])).sum()


class Unreached(Steps):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        self.parallelize_plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers(batch)
        loss = batch.requires_grad_().square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
        return loss
