"""One rank of a measurement of memory: trains, and says what it has found.

python benchmarks/memory_rank.py '{"strategy": "ddp", "model": "memory"}'
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from my_project_trainer import Trainer, TrainingModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, Dataset

import meter
import subjects
from child import end_with
from job import SIZES
from subjects import Net, load_lazily_loaded

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


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples drawn by their index.

    Args:
        net: makes them.
        fetched: called before each is made. A rank reads one a step, so that this is after a
            step's gradients were freed and before the next forward.
    """

    def __init__(self, net: Net, fetched: Callable[[], None]) -> None:
        self.net, self.fetched = net, fetched

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched()
        inputs, targets = self.net.samples(1, torch.Generator().manual_seed(index))
        return inputs[0], targets[0]


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
        net: Any = self
        return DataLoader(Samples(net, self.fetched), batch_size=1)


class GPT(subjects.GPT, Subject):
    """A GPT of a size of job.py."""

    default = "memory"

    def __init__(self, size: str | None = None) -> None:
        super().__init__(SIZES[size or self.default])


# None of these was used to find a formula of `plan`.
class LongGPT(GPT):
    default = "LongGPT"


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
            self.peak = meter.peak()
            self.live = LiveTensors(self.module)
        if done == timed_end + 1:
            self.finish()

    def finish(self) -> None:
        """Say what was found, and end without the checkpoint that a run ends with."""
        found = {
            "base": self.base,
            "set_up": self.set_up_peak - self.base,
            "steady": max(self.steady) - self.base,
            "peak": self.peak - self.base,
            "step_s": meter.seconds_between(self.clock[0], self.clock[-1]) / self.steps,
            "loss": sum(self.module.losses) / len(self.module.losses),
            **self.live.close(),
        }
        dist.barrier()  # a rank that ends would fail those that still read from it
        end_with(found)


class LiveTensors:
    """Counts what tensors hold while optimizers step, each storage once.

    It hooks every optimizer in this process, an engine's inner ones too: before a step gradients
    are there, and after it the state. What an optimizer steps that is no part of the module is a
    copy of an engine's, and counts as optimizer state.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        kinds = ("parameters", "gradients", "optimizer")
        self._found: dict[str, dict[int, int]] = {kind: {} for kind in kinds}
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> dict[str, float]:
        """MiB of each kind."""
        for handle in self._handles:
            handle.remove()
        return {kind: sum(found.values()) / 2**20 for kind, found in self._found.items()}

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        own = list(self._module.parameters())
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._add("parameters", [getattr(each, "ds_tensor", each) for each in own])
        self._add("optimizer", stepped)
        self._add("gradients", [each.grad for each in (*own, *stepped) if each.grad is not None])

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            self._add("optimizer", [each for each in state.values() if isinstance(each, Tensor)])

    def _add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.detach().untyped_storage()
            if not any(storage.data_ptr() in found for found in self._found.values()):
                self._found[kind][storage.data_ptr()] = storage.nbytes()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=job.strategy,
        precision=job.precision,
        activation_checkpointing=job.checkpointing,
        max_steps=WARMUP + job.steps + 2,
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
