"""One rank of one measurement: trains, and writes what it found as JSON into a file.

python benchmarks/memory_one.py '{"strategy": "ddp", …}' result.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from my_project_trainer import Trainer
from torch.utils.data import DataLoader

import memory_meter
import plan_subject
from memory_subject import GPT, Size, Tokens
from meter import Reading, read

WORLD_SIZE = int(os.environ["WORLD_SIZE"])
# The first step makes the optimizers' state, and the second may still settle.
WARMUP = 2


@dataclass(frozen=True)
class Job:
    """What is measured: a strategy, a model and its size, and timed steps after `WARMUP`.

    `model`: of plan_subject; by default the GPT of memory_subject, of `width` and `depth`.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    width: int = 1024
    depth: int = 8
    steps: int = 5
    model: str = ""
    precision: str = "32-true"
    checkpointing: tuple[str, ...] = ()


class Probe:
    """Reads memory and clocks; `fetched` is called between any two steps.

    Args:
        job: what is measured.
        result: file for what was found.
    """

    module: Any

    def __init__(self, job: Job, result: Path) -> None:
        self.job, self.result = job, result
        self.count = 0
        self.set_up_peak = self.peak = self.base = 0.0
        self.steady: list[float] = []
        self.clock: list[Reading] = []

    def loader(self) -> DataLoader[Any]:
        """Asked for when the process group is formed, and before the model gets memory."""
        self.base = memory_meter.resident()
        memory_meter.forget_peak()
        steps = WARMUP + self.job.steps + 3
        samples: Any = Tokens(steps * WORLD_SIZE, self.fetched)
        if self.job.model:
            samples = plan_subject.Samples(self.module, steps * WORLD_SIZE, self.fetched)
        return DataLoader(samples, batch_size=1)

    def fetched(self) -> None:
        """Before the first step, after the last one, and between any two."""
        done, self.count = self.count, self.count + 1
        timed_end = WARMUP + self.job.steps
        if done == 0:
            self.set_up_peak = memory_meter.peak()
            memory_meter.forget_peak()
        if WARMUP <= done <= timed_end:
            self.steady.append(memory_meter.resident())
            self.clock.append(read())
        if done == timed_end:
            self.peak = memory_meter.peak()
            self.live = memory_meter.LiveTensors(self.module)
        if done == timed_end + 1:
            self.finish()

    def finish(self) -> None:
        """Write what was found, and end without the checkpoint that a run ends with."""
        first, last = self.clock[0], self.clock[-1]
        seconds = (last.wall - first.wall - (last.waited - first.waited)) / 1e9
        found = {
            "base": self.base,
            "set_up": self.set_up_peak - self.base,
            "steady": max(self.steady) - self.base,
            "peak": self.peak - self.base,
            "step_s": seconds / self.job.steps,
            "loss": sum(self.module.losses) / len(self.module.losses),
            **self.live.close(),
        }
        self.result.write_text(json.dumps(found))
        dist.barrier()  # a rank that ends would fail those that still read from it
        os._exit(0)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=job.strategy,
        strategy_options=job.options,
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
    memory_meter.load_lazily_loaded()
    probe = Probe(job, Path(sys.argv[2]))
    with trainer.building():
        module: Any
        if job.model:
            module = getattr(plan_subject, job.model)()
            module.loader = probe.loader
        else:
            module = GPT(Size(job.width, job.depth), probe.loader)
    probe.module = module
    trainer.fit(module)


if __name__ == "__main__":
    main()
