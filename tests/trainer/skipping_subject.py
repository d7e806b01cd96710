"""Two ranks; one element of the gradients overflows in the second of three steps.

``python -m skipping_subject FOLDER STRATEGY[-views] …`` fits once under each strategy. With
``-views`` a gradient shares its memory with one that backward still uses.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import Trainer, TrainingModule
from torch import Tensor, nn

# Half precision rounds the input to 1, and has room for the factor times the scale of losses.
INPUT, FACTOR = 1.0 + 2.0**-12, 2.0**-4


class Overflows(TrainingModule):
    """The last element of the last parameter overflows. Only one rank updates it."""

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

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Views(TrainingModule):
    """The gradient of the view of a bias is that of the layer's output, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(2, 2, bias=False), nn.Parameter(torch.zeros(2))
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layer(torch.tensor([[1.0, 2.0]])) + self.bias.view(1, 2)
        return (output * torch.tensor([[3.0, 5.0]])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def main(folder: Path, names: list[str]) -> None:
    """Fit under each strategy."""
    for name in names:
        strategy, _, variant = name.partition("-")
        options: dict[str, Any] = {"timeout_seconds": 600}
        module = Views() if variant == "views" else Overflows()
        Trainer(
            **{"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 1},
            **{"precision": "32-true" if variant else "16-mixed", "strategy_options": options},
            **{"default_root_dir": folder, "run_name": name, "loggers": []},
            enable_progress_bar=False,
        ).fit(module, [torch.ones(1)] * 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
