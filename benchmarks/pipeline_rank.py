"""One rank of several measurements of pipelines, each of which it trains once."""

import time
from dataclasses import dataclass, field
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import meter
from child import argument, end_with
from subjects import load_lazily_loaded

WARMUP = 1


@dataclass(frozen=True)
class Job:
    """What is measured: layers that sleep, or a convolutional network for `"images"`.

    The forward of a sleeping layer takes so many seconds, and its backward twice as long. With one
    device it is the whole model.
    """

    subject: str
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    batch_size: int = 16
    steps: int = 2
    seconds: float = 0.1


class Busy:
    """Seconds that this process has computed (slept)."""

    seconds = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        """Compute for so long; a busy machine may make it longer."""
        started = time.monotonic()
        time.sleep(seconds)
        cls.seconds += time.monotonic() - started


def sleep_in_backward(value: Tensor, seconds: float) -> Tensor:
    """The same value, whose gradient takes so long."""
    value = value.view_as(value)
    if value.requires_grad:
        value.register_hook(lambda _: Busy.sleep(seconds))
    return value


class Sleep(nn.Module):
    """Sleeps in forward, for its input's gradient, and for its weight's, each as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        Busy.sleep(self.seconds)
        return sleep_in_backward(x, self.seconds) + sleep_in_backward(self.weight, self.seconds)


class Sleeping(trainer.TrainingModule):
    """A layer that sleeps on each process; its input needs a gradient, so that all take as long."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.sequential_module = nn.Sequential(*(Sleep(job.seconds) for _ in range(job.devices)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.sequential_module(batch[0] * self.scale).mean()

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

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.sequential_module(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Clock(trainer.DataModule):
    """The data; notes what a process has used when a batch is asked for: between two steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.base = job, 0.0
        self.times: list[float] = []
        self.busy: list[float] = []
        self.peaks: list[float] = []

    def train_dataloader(self) -> Any:
        self.base = meter.resident()
        count = self.job.batch_size * (WARMUP + self.job.steps + 1)
        indices: Any = range(count)
        return DataLoader(indices, self.job.batch_size, collate_fn=self.batch)

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        self.times.append(time.monotonic())
        self.busy.append(Busy.seconds)
        self.peaks.append(meter.peak())
        meter.forget_peak()
        numbers = torch.tensor(indices)
        shape = (1,) if self.job.subject == "sleep" else (3, 32, 32)
        inputs = torch.ones(len(indices), *shape) * (numbers % 7).view(-1, *(1 for _ in shape))
        return inputs, numbers % 10


def measure(job: Job) -> dict[str, Any]:
    """Train once."""
    clock = Clock(job)
    trainer.Trainer(
        accelerator="cpu",
        strategy="sequential" if job.devices > 1 else "single_device",
        strategy_options=job.options,
        devices=job.devices,
        max_steps=WARMUP + job.steps + 1,
        loggers=[],
        enable_progress_bar=False,
        global_batch_size=job.batch_size,
    ).fit(Sleeping(job) if job.subject == "sleep" else Images(), clock)
    steps = range(-job.steps, 0)
    return {
        "step_s": [clock.times[index] - clock.times[index - 1] for index in steps],
        "busy_s": [clock.busy[index] - clock.busy[index - 1] for index in steps],
        "peak": max(clock.peaks[-job.steps :]) - clock.base,
    }


def main() -> None:
    torch.set_num_threads(1)
    load_lazily_loaded()
    end_with([measure(Job(**job)) for job in argument()])


if __name__ == "__main__":
    main()
