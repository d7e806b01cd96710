"""Measurements of pipelines in one start of the ranks; each writes what it found into a folder.

python benchmarks/pipeline_one.py '[{"subject": "sleep", …}, …]' FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import memory_meter

WARMUP = 1


@dataclass(frozen=True)
class Job:
    """What is measured.

    Args:
        subject: `"sleep"`, layers that sleep, or `"images"`, a convolutional network.
        strategy: its name.
        options: of the strategy.
        devices: number of processes.
        batch_size: samples of a batch.
        steps: measured steps.
        seconds: that the forward of a sleeping layer takes; its backward takes twice as long.
        layers: number of sleeping layers.
    """

    subject: str
    strategy: str = "sequential"
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    batch_size: int = 16
    steps: int = 2
    seconds: float = 0.1
    layers: int = 2


class Busy:
    """Seconds that this process has computed (slept), and when each step began."""

    seconds = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        """Compute for so long; a busy machine may make it longer."""
        started = time.monotonic()
        time.sleep(seconds)
        cls.seconds += time.monotonic() - started


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        Busy.sleep(context.seconds)
        return gradients[0], None


class Sleep(nn.Module):
    """Sleeps in forward, for its input's gradient, and for its weight's, each as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        Busy.sleep(self.seconds)
        weight = _SleepInBackward.apply(self.weight, self.seconds)
        return _SleepInBackward.apply(x, self.seconds) + weight


class Sleeping(trainer.TrainingModule):
    """Layers that sleep; its input needs a gradient, so that all layers take as long."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.sequential_module = nn.Sequential(*(Sleep(job.seconds) for _ in range(job.layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequential_module(batch * self.scale).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Images(trainer.TrainingModule):
    """A convolutional network for images of 32 x 32 pixels in ten classes.

    Its first layers have nearly all activations, its last ones nearly all parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in (32, 64, 128):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before = channels
        head = [nn.Flatten(), nn.Linear(128 * 16, 256), nn.ReLU(), nn.Linear(256, 10)]
        self.sequential_module = nn.Sequential(*layers, *head)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.sequential_module(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Samples(Dataset[Any]):
    """Samples, and a clock: the batches of a step are read between two steps."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return self.job.batch_size * (WARMUP + self.job.steps + 1)

    def __getitem__(self, index: int) -> Any:
        if self.job.subject == "sleep":
            return torch.ones(1)
        return torch.ones(3, 32, 32) * (index % 7), index % 10


class Clock(trainer.DataModule):
    """The data; it notes when a batch is asked for, and the memory since the last one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.times: list[float] = []
        self.busy: list[float] = []
        self.base = 0.0
        self.peaks: list[float] = []

    def train_dataloader(self) -> Any:
        self.base = memory_meter.resident()
        data = Samples(self.job)
        return DataLoader(data, self.job.batch_size, collate_fn=self._collated)

    def _collated(self, samples: Any) -> Any:
        self.times.append(time.monotonic())
        self.busy.append(Busy.seconds)
        self.peaks.append(memory_meter.peak())
        memory_meter.forget_peak()
        return torch.utils.data.default_collate(samples)


def measure(job: Job, folder: Path) -> dict[str, Any]:
    """Train once."""
    data = Clock(job)
    run = trainer.Trainer(
        accelerator="cpu",
        strategy=job.strategy,
        strategy_options=job.options,
        devices=job.devices,
        max_steps=WARMUP + job.steps + 1,
        loggers=[],
        enable_progress_bar=False,
        default_root_dir=folder,
        global_batch_size=job.batch_size,
    )
    run.fit(Sleeping(job) if job.subject == "sleep" else Images(), data)
    steps = range(-job.steps, 0)
    return {
        "rank": run.global_rank,
        "step_s": [data.times[index] - data.times[index - 1] for index in steps],
        "busy_s": [data.busy[index] - data.busy[index - 1] for index in steps],
        "peak": max(data.peaks[-job.steps :]) - data.base,
    }


def main() -> None:
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    memory_meter.load_lazily_loaded()
    found = [measure(Job(**load), folder) for load in json.loads(sys.argv[1])]
    (folder / f"rank-{found[0]['rank']:.0f}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
