"""Ranks that start with different weights, draw random numbers, print and log.

``python -m ranks_subject FOLDER STRATEGY[-manual] …`` fits once under each strategy, on two
ranks. Each rank writes what it has seen to ``STRATEGY-RANK.json``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import SumMetric

from fitting import Descends, quiet


class Unequal(Descends, by=torch.optim.Adam, lr=0.0):
    """Weights and buffers start as the rank plus one."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        weight = float(os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or 0) + 1
        self.first = nn.Linear(2, 4)
        self.last = nn.Linear(4, 2)
        for parameter in self.parameters():
            parameter.data.fill_(weight)
        self.register_buffer("scale", torch.full((3,), weight))
        self.samples = SumMetric()
        self.seen: dict[str, Any] = {"evaluated": []}

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            print(f"printed by rank {self.global_rank}", flush=True)
            self.seen["drawn"] = torch.rand(3).tolist()
            started = (self.scale, self.first.weight, self.last.bias)
            values = torch.cat([tensor.flatten() for tensor in started])
            self.seen["started with"] = values.unique().tolist()
        number = self.global_rank + 1.0
        self.log("low", number, on_epoch=True, reduce_fx="min")
        self.log("high", number, on_epoch=True, reduce_fx="max")
        count = float(len(batch[0]))
        self.samples.update(count)
        self.log("metric", self.samples)
        self.log("sum", count, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("mean", number, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.scale.fill_(number)  # like BatchNorm's statistics, which differ between ranks
        values = self.last(self.first(batch[0]))
        loss = values.square().mean()
        outputs = {"loss": loss, "preds": values + number, "names": ["a"]}
        if self.automatic_optimization:
            return outputs
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return outputs

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept = [outputs["preds"].requires_grad, outputs["loss"].requires_grad]
        self.seen["outputs"] = [outputs["preds"].tolist(), outputs["names"], kept]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["evaluated"] += self.scale.unique().tolist()
        self.last(self.first(batch[0]))
        self.log("val_low", self.global_rank + 1.0, reduce_fx="min")

    def on_validation_epoch_end(self) -> None:
        self.log("val_ranks", self.global_rank + 1.0)

    def train_dataloader(self) -> Any:
        # The last of nine samples is rank 0's: rank 1 has a padding batch.
        return DataLoader(TensorDataset(torch.ones(9, 2)), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(1, 2)), batch_size=1)  # one sample, on rank 0


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        strategy = name.removesuffix("-manual")
        module = Unequal(manual=strategy != name)
        run = quiet(
            **{"devices": 2, "strategy": strategy, "strategy_options": {"timeout_seconds": 600}},
            **{"log_every_n_steps": 1, "val_every_n_steps": 1, "checkpoint_every_n_steps": 1},
            **{"default_root_dir": folder, "run_name": name, "loggers": ["csv"]},
            **{"max_epochs": 1, "sanity_check": 0},
        )
        run.fit(module)
        record = module.seen | {"interface": os.environ.get("GLOO_SOCKET_IFNAME")}
        (folder / f"{name}-{run.global_rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
