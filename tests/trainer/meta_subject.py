"""Begins models on the meta device with two ranks; started by test_meta_device.py.

``python -m meta_subject FOLDER STRATEGY OPTIONS …``: each rank writes the names of the layers that
it has initialized to ``drawn-STRATEGY-RANK.json``; the run's checkpoint has the initial weights.
"""

import json
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from sharding_subject import Tied


class Begins(Tied):
    """Keeps its initial weights, and the names of layers that are initialized here."""

    def __init__(self, folder: str = ".") -> None:
        super().__init__(folder)
        self.drawn: list[str] = []
        self.parallelize_plan = {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
        }

    def initialize(self, name: str, layer: nn.Module) -> None:
        self.drawn.append(name)
        super().initialize(name, layer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    on_train_epoch_end = trainer.TrainingModule.on_train_epoch_end


if __name__ == "__main__":
    torch.set_num_threads(1)
    for strategy, options in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        run = trainer.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            strategy_options=json.loads(options),
            meta_device=True,
            max_steps=1,
            limit_val_batches=0,
            loggers=[],
            enable_progress_bar=False,
            default_root_dir=sys.argv[1],
            run_name=strategy,
        )
        with run.building():
            module = Begins()
        run.fit(module)
        drawn = Path(sys.argv[1], f"drawn-{strategy}-{run.global_rank}.json")
        drawn.write_text(json.dumps(module.drawn))
