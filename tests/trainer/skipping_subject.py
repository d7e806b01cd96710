"""Two ranks; one element of the gradients overflows in the second of three steps.

``python -m skipping_subject FOLDER STRATEGY[-fp16] …`` fits once under each strategy.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from my_project.trainer import Trainer, TrainingModule

GRADIENT = 1.0 + 2.0**-12  # which half precision rounds to 1


class Overflows(TrainingModule):
    """The last element of the last parameter overflows. Only one rank updates it."""

    def __init__(self, overflows: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 1, bias=False), nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.last.weight)
        self.overflows = overflows

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        inputs = torch.full((1, 8), GRADIENT)
        with torch.autocast("cpu", enabled=False):
            loss = self.first(inputs) + self.last(inputs)
            if self.overflows and batch_idx == 1:
                last = torch.zeros(1, 8)
                last[0, -1] = 1e38
                loss = loss + self.last(last)
        return loss.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def main(folder: Path, names: list[str]) -> None:
    """Fit under each strategy."""
    for name in names:
        strategy, _, half = name.partition("-")
        options: dict[str, Any] = {"timeout_seconds": 60, **({"reduce_fp16": True} if half else {})}
        module = Overflows(overflows=not half)
        Trainer(
            **{"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 1},
            **{"precision": "32-true" if half else "16-mixed", "strategy_options": options},
            **{"default_root_dir": folder, "run_name": name, "loggers": []},
            enable_progress_bar=False,
        ).fit(module, [torch.ones(1)] * 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
