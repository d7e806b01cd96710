"""Two fits in one process a rank, with loader workers that collect garbage.

``python -m twice_subject FOLDER`` prints after each fit which of gloo's threads are left.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fitting

TASKS = Path("/proc/self/task")


class Collecting(Dataset[Tensor]):
    """Has each worker collect what it finds."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        gc.collect()
        return torch.full((2,), float(index))


class Model(fitting.Descends, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def on_fit_start(self) -> None:
        garbage: list[object] = [dist.group.WORLD]
        garbage.append(garbage)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Collecting(), batch_size=2, num_workers=1)


def fit(folder: Path, name: str) -> None:
    """What is left of it is garbage that nobody has collected."""
    run = fitting.fit(Model(), folder, devices=2, strategy="ddp", max_epochs=1, run_name=name)
    left = [name for path in TASKS.iterdir() if "gloo" in (name := (path / "comm").read_text())]
    if run.global_rank == 0:
        print("left:", *{line.strip() for line in left}, flush=True)


if __name__ == "__main__":
    gc.disable()
    for name in ("first", "second"):
        fit(Path(sys.argv[1]), name)
    sys.excepthook(ValueError, ValueError("shown"), None)
