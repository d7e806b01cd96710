"""What long_runs.py trains; each rank writes what its process, and its launcher, use now and then.

``python -m long_runs_subject OPTIONS EVERY FOLDER``, with the trainer's options as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import Trainer, TrainingModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 32


def used(process: int) -> dict[str, float]:
    """Memory in MiB (resident, its part of shared pages, anonymous), descriptors and threads."""
    folder = Path(f"/proc/{process}")
    lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
    memory = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {
        "resident": memory["Rss"],
        "own": memory["Pss"],
        "anonymous": memory["Anonymous"],
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
    }


def yardstick() -> float:
    """Processor seconds of a fixed piece of work, which a busy machine makes longer, too."""
    before = time.process_time()
    layer = nn.Linear(WIDTH, WIDTH)
    for _ in range(100):
        layer(torch.ones(4, WIDTH)).sum().backward()
    return time.process_time() - before


class Long(TrainingModule):
    """A small network with dropout, whose losses are logged.

    Args:
        every: Steps between two readings.
        workers: Of its loaders.
        samples: Of an epoch.
    """

    def __init__(self, every: int, workers: int, samples: int) -> None:
        super().__init__()
        self.every, self.workers, self.samples = every, workers, samples
        self.spent = 0.0  # seconds of readings
        self.network = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.network(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % self.every:
            return
        reading = {"step": self.global_step, "cpu_s": time.process_time() - self.spent}
        began = time.process_time()
        with torch.random.fork_rng():
            reading |= {"yardstick_ms": 1000 * yardstick(), **used(os.getpid())}
        if "RANK" in os.environ and self.global_rank == 0:
            reading["launcher"] = used(os.getppid())["anonymous"]
        with Path(f"rank-{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(reading) + "\n")
        self.spent += time.process_time() - began

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.001)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.samples)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(64)

    def _loader(self, samples: int) -> DataLoader[Any]:
        inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, inputs.mean(1, keepdim=True))
        return DataLoader(data, batch_size=4, num_workers=self.workers)


def main() -> None:
    job, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    os.chdir(folder)
    torch.set_num_threads(1)
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, **job["options"])
    trainer.fit(Long(**job["model"]))


if __name__ == "__main__":
    main()
