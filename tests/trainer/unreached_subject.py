"""A loss that no parameter reaches, under each strategy.

``python -m unreached_subject FOLDER STRATEGY[-manual|-unused] …`` fits once under each strategy, on
two ranks. Each rank writes how its fits ended to ``RANK.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.errors import UserError
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset


class Unreached(TrainingModule):
    """The loss depends on the batch only."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        self.parallelize_plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers(batch[0])
        loss = batch[0].requires_grad_().square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)


def main(folder: Path, names: list[str]) -> None:
    """Fit under each strategy."""
    ends: dict[str, list[str]] = {}
    for name in names:
        strategy, _, variant = name.partition("-")
        options: dict[str, Any] = {"timeout_seconds": 600}
        if variant == "unused":
            options["find_unused_parameters"] = True
        run = Trainer(
            **{"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_steps": 1},
            **{"strategy_options": options, "default_root_dir": folder, "run_name": name},
            **{"loggers": [], "enable_progress_bar": False},
        )
        try:
            run.fit(Unreached(manual=variant == "manual"))
            ends[name] = ["trained"]
        except UserError as error:
            ends[name] = error.problems
        (folder / f"{run.global_rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
