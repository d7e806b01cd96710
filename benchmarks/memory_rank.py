"""One rank of a measurement of memory: trains, and returns what it has read."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from my_project_trainer import Trainer, TrainingModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import meter
import subjects
from child import argument, end_with
from job import SIZES
from subjects import load_lazily_loaded

# The first step makes the optimizers' state, and the second may still settle.
WARMUP = 2
SAMPLES = 4096


@dataclass(frozen=True)
class Job:
    """What is measured: a strategy, a model of subjects.py, and timed steps after `WARMUP`.

    `imports` are loaded before anything is read: an engine's code is not its memory of a model.
    """

    strategy: str
    model: str
    imports: tuple[str, ...] = ()
    steps: int = 5
    precision: str = "32-true"
    checkpointing: tuple[str, ...] = ()


class Subject(TrainingModule):
    """What trains a model with Adam and a sample a step and rank; the model itself comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.loading: Callable[[], None] = lambda: None
        self.fetched: Callable[[], None] = lambda: None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(*batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-5)

    def train_dataloader(self) -> DataLoader[Any]:
        self.loading()
        indices: Any = range(SAMPLES)
        return DataLoader(indices, batch_size=1, collate_fn=self.batch)

    def batch(self, indices: list[int]) -> subjects.Batch:
        """A rank reads one a step, after its gradients were freed and before the next forward."""
        self.fetched()
        net: Any = self
        return net.samples(len(indices), torch.Generator().manual_seed(indices[0]))


class GPT(subjects.GPT, Subject):
    """A GPT of a size of job.py."""

    def __init__(self, size: str) -> None:
        super().__init__(SIZES[size])


# None of these was used to find a formula of `plan`.
class LongGPT(GPT):
    def __init__(self) -> None:
        super().__init__("LongGPT")


class Convolutions(subjects.Convolutions, Subject):
    pass


class Embeddings(subjects.Embeddings, Subject):
    pass


MODELS: dict[str, Callable[[], Subject]] = {
    "Convolutions": Convolutions,
    "Embeddings": Embeddings,
    **{name: partial(GPT, name) for name in SIZES},
}


class Probe:
    """Reads memory and clocks of a module's run, and ends it.

    `started` is called when the process group is formed and before the model gets memory,
    `fetched` before the first step, after the last one, and between any two.
    """

    def __init__(self, module: Subject, steps: int) -> None:
        self.module, self.steps, self.count = module, steps, 0
        self.set_up_peak = self.base = 0.0
        self.steady: list[float] = []
        self.clock: list[meter.Reading] = []
        module.loading, module.fetched = self.started, self.fetched

    def started(self) -> None:
        self.base = meter.resident()
        meter.forget_peak()

    def fetched(self) -> None:
        done, self.count = self.count, self.count + 1
        timed_end = WARMUP + self.steps
        if done == 0:
            self.set_up_peak = meter.peak()
            meter.forget_peak()
        if WARMUP <= done <= timed_end:
            self.steady.append(meter.resident())
            self.clock.append(meter.read())
        if done == timed_end:
            self.finish()

    def finish(self) -> None:
        """Return what was read, and end without the checkpoint that a run ends with."""
        results = {
            "set_up": self.set_up_peak - self.base,
            "steady": max(self.steady) - self.base,
            "peak": meter.peak() - self.base,
            "step_s": meter.seconds_between(self.clock[0], self.clock[-1]) / self.steps,
            "loss": sum(self.module.losses) / len(self.module.losses),
        }
        dist.barrier()  # a rank that ends would fail those that still read from it
        end_with(results)


def main() -> None:
    job = Job(**argument())
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=job.strategy,
        precision=job.precision,
        activation_checkpointing=job.checkpointing,
        max_steps=WARMUP + job.steps + 1,
        loggers=[],
        enable_progress_bar=False,
        # No memory before the strategy sets up; and the same first weights under all of them.
        meta_device=True,
    )
    for name in job.imports:
        importlib.import_module(name)
    load_lazily_loaded()
    with trainer.building():
        module = MODELS[job.model]()
    Probe(module, job.steps)
    trainer.fit(module)


if __name__ == "__main__":
    main()
