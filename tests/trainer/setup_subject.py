"""A module and a data module whose hooks prepare data, and create layers and loaders.

``python -m setup_subject FOLDER STRATEGY DEVICES`` fits and tests; each rank writes its calls.
With ``fails`` as the fourth word, ``prepare_data`` raises.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import DataModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet


class Points(DataModule):
    def __init__(self, folder: Path, fails: bool = False) -> None:
        self.folder, self.fails = folder, fails
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        if self.fails:
            raise OSError("no such archive")
        self.calls.append("prepare_data")
        torch.save(torch.linspace(-1, 1, 48).reshape(12, 4), self.folder / "data.pt")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        x = torch.load(self.folder / "data.pt")
        self.data = TensorDataset(x, x.sum(1, keepdim=True))

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=12 // Net.processes)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=4)


class Net(Descends):
    processes = 1

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[Any] = []

    def setup(self, stage: str) -> None:
        self.facts.append([stage, self.local_rank, self.world_size, self.is_global_zero])
        self.print(f"set up for {stage}", flush=True)
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(4, 1)
            nn.init.constant_(self.layer.weight, 0.1 + self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.layer(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", mse_loss(self.layer(batch[0]), batch[1]))


def main(folder: Path, strategy: str, devices: int, fails: bool) -> None:
    Net.processes = devices
    module, data = Net(), Points(folder, fails)
    shared = {"strategy_options": {} if devices == 1 else {"timeout_seconds": 600}}
    shared |= {"strategy": strategy, "max_steps": 3, "default_root_dir": folder}
    run = quiet(devices=devices, **shared)
    run.fit(module, data)
    tested = run.test(module, data)
    record = {"calls": data.calls, "facts": module.facts, **tested}
    (folder / f"{strategy}-{run.global_rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["fails"])
