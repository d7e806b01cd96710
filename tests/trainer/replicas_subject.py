"""Two ranks that read loaders of their own: split by replica, by rank, or not at all.

``python -m replicas_subject FOLDER STRATEGY:SPLIT …`` fits once for each, and prints the loss.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from fitting import Descends, quiet

OPTIONS: dict[str, Any] = {"sequential": {"microbatches": 2}}


class Stream(IterableDataset[Tensor]):
    def __init__(self, first: int, step: int) -> None:
        self.samples = range(first, 16, step)

    def __iter__(self) -> Iterator[Tensor]:
        for number in self.samples:
            yield torch.full((6, 2), float(number))


class Model(Descends, lr=0.01):
    parallelize_plan = {  # noqa: RUF012
        "sequential_module.0": ColwiseParallel(),
        "sequential_module.1": RowwiseParallel(),
    }

    def __init__(self, split: str) -> None:
        super().__init__()
        self.split = split
        self.sequential_module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        self.seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] if isinstance(batch, list) else batch
        self.seen = self.seen + x[:, 0, 0].sum()
        loss: Tensor = self.sequential_module(x).square().mean()
        return loss


class Data(trainer.DataModule):
    def __init__(self, split: str) -> None:
        self.split = split

    def train_dataloader(self) -> Any:
        of_all = {
            "whole": (0, 1),
            "replica": (self.data_index, self.data_replicas),
            "rank": (torch.distributed.get_rank(), 2),
        }
        first, step = of_all[self.split.removesuffix("-sampler")]
        if self.split.endswith("-sampler"):
            data = TensorDataset(torch.stack(list(Stream(0, 1))))
            return DataLoader(data, 4, sampler=DistributedSampler(data, step, first, shuffle=False))
        return DataLoader(Stream(first, step), batch_size=4)


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        strategy, split = name.split(":")
        torch.manual_seed(0)
        module = Model(split)
        options = {**OPTIONS.get(strategy, {}), "timeout_seconds": 600}
        how = {"devices": 2, "strategy": strategy, "strategy_options": options, "max_epochs": 1}
        run = quiet(default_root_dir=folder, run_name=name.replace(":", "-"), **how)
        print(f"{name} begins", file=sys.stderr, flush=True)
        run.fit(module, Data(split))
        rank = os.environ.get("RANK", "0")
        assert (module.data_index, module.data_replicas) == (0, 1)  # outside of a run
        print(f"{name} rank {rank} saw {float(module.seen):g}", flush=True)
        print(f"{name} ends", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
