"""One rank of a measurement of checkpoints: saves and resumes, and writes what it found as JSON.

python benchmarks/checkpoint_rank.py '{"width": 4096, "tensors": 60, "rounds": 3}' FOLDER
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from my_project_trainer import TrainingModule
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.writing import Checkpoints
from my_project_trainer.strategies.base import Strategy
from my_project_trainer.strategies.optimizers import Optimization
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam, Optimizer

import memory_meter

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class Job:
    """What is measured: equal square matrices, sharded over all ranks by FSDP if there are several.

    `threads`: of torch.distributed.checkpoint's writer, each a contestant.
    """

    width: int
    tensors: int
    rounds: int
    threads: tuple[int, ...] = (1, 2)

    @property
    def parameters(self) -> int:
        """Numbers in the model."""
        return self.tensors * self.width**2


class Model(TrainingModule):
    """Matrices without a forward: nothing is trained."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        for index in range(job.tensors):
            matrix = torch.empty(job.width, job.width, device="meta")
            self.register_parameter(f"matrix_{index}", nn.Parameter(matrix))


class Rank:
    """This rank's share of a model and of Adam's moments, in memory from the start."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.module = Model(job)
        if WORLD_SIZE > 1:
            fully_shard(self.module)
        self.module.to_empty(device="cpu")
        self.strategy = Strategy()
        self.strategy.module = self.module
        self.fill(list(self.module.parameters()))
        self.optimizer: Optimizer = self.new_optimizer()

    @torch.no_grad()
    def fill(self, tensors: list[Any]) -> None:
        """Fill tensors with values that differ from rank to rank."""
        for index, tensor in enumerate(tensors):
            part = tensor.to_local() if WORLD_SIZE > 1 else tensor
            torch.nn.init.uniform_(
                part, generator=torch.Generator().manual_seed(RANK * len(tensors) + index)
            )

    def new_optimizer(self) -> Optimizer:
        """Create an Adam as after its first step."""
        found = Adam(self.module.parameters())
        for parameter in self.module.parameters():
            moments = [torch.empty_like(parameter, requires_grad=False) for _ in range(2)]
            self.fill(moments)
            found.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": moments[0],
                "exp_avg_sq": moments[1],
            }
        return found

    def state(self) -> dict[str, Any]:
        """The state that both save: by parameter name, sharded."""
        return self.strategy.state(Optimization([self.optimizer], []))

    # --- contestants: each returns what is to be measured, after what is not ----------------------

    def save(self, name: str) -> Callable[[], None]:
        """A save by the trainer, or by torch.distributed.checkpoint with so many threads."""
        path = self.folder / name
        state = self.state()
        if name == "trainer":
            checkpoints = Checkpoints(path)
            return lambda: checkpoints.save(1, state, {})
        writer = dcp.FileSystemWriter(path, thread_count=int(name[-1]))

        def save() -> None:
            dcp.save(state, storage_writer=writer)

        return save

    def resume(self, name: str) -> Callable[[], None]:
        """A resume, without the moments that the optimizer had; the parameters are filled."""
        for parameter in self.module.parameters():
            parameter.data.zero_()
        path = self.folder / name
        self.optimizer.state.clear()
        gc.collect()
        if name == "trainer":
            return lambda: self.resume_by_trainer(path)
        return lambda: self.resume_by_torch(path)

    def verify(self, path: Path) -> None:
        """Verify this rank's share of the checksums, as a run does before it resumes."""
        Checkpoint(path / "step-00000001").check_contents(RANK, WORLD_SIZE)

    def resume_by_trainer(self, path: Path) -> None:
        """Verify and load."""
        started = time.perf_counter()
        self.verify(path)
        self.verified = time.perf_counter() - started
        saved = Checkpoint(path / "step-00000001").stored_state()
        self.strategy.load_state(saved, Optimization([self.optimizer], []))

    def resume_by_torch(self, path: Path) -> None:
        """Load in place, into moments of which only the memory is new."""
        for parameter in self.module.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.empty_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
            }
        dcp.load(self.state(), storage_reader=dcp.FileSystemReader(path))

    # --- measurements --------------------------------------------------------------------------

    def measured(self, what: Callable[[], None]) -> dict[str, float]:
        """Seconds until all ranks are done; this rank's CPU seconds and peak of memory, in MiB."""
        gc.collect()
        before = memory_meter.resident()
        memory_meter.forget_peak()
        barrier()
        started, cpu = time.perf_counter(), time.process_time()
        what()
        cpu = time.process_time() - cpu  # not that of waiting for others
        barrier()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "cpu": cpu, "added": memory_meter.peak() - before}

    def one_round(self, number: int) -> dict[str, dict[str, float]]:
        """Save and resume by all contestants; every other round is in reverse order."""
        names = ["trainer", *(f"torch, threads: {thread}" for thread in self.job.threads)]
        names = names[::-1] if number % 2 else names
        found = {}
        for name in names:
            found[f"save, {name}"] = self.measured(self.save(name))
        saved = self.sums()
        # Files of all variants of torch's writer are read by the same reader.
        for name in (each for each in names if not each.startswith("torch") or each[-1] == "1"):
            found[f"resume, {name}"] = self.measured(self.resume(name))
            if self.sums() != saved:
                raise SystemExit(f"{name}: what was loaded is not what was saved")
            if name == "trainer":
                found["verify"] = {"seconds": self.verified}
        barrier()
        if RANK == 0:
            for name in names:
                shutil.rmtree(self.folder / name)
        barrier()
        return found

    def sums(self) -> list[float]:
        """A sum of each tensor's values on this rank."""
        tensors: list[Any] = list(self.module.parameters())
        for values in self.optimizer.state.values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        return [float(each.detach().double().sum()) for each in local]

    def opening(self) -> dict[str, float]:
        """Seconds to open a checkpoint and to read its table of tensors."""
        self.save("trainer")()
        started, cpu = time.perf_counter(), time.process_time()
        Checkpoint(self.folder / "trainer" / "step-00000001").stored_state()
        return {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}


def barrier() -> None:
    if WORLD_SIZE > 1:
        dist.barrier()


def main() -> None:
    job, folder = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if WORLD_SIZE > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    memory_meter.load_lazily_loaded()
    rank = Rank(job, folder)
    found: list[dict[str, dict[str, float]]] = []
    for number in range(job.rounds + 1):
        one = rank.one_round(number)
        if WORLD_SIZE == 1:
            one["open"] = rank.opening()
        found.append(one)
        print(json.dumps({"rank": RANK, "round": number, **one}), file=sys.stderr, flush=True)
    # The first round imports, and touches memory for the first time.
    (folder / f"{RANK}.json").write_text(json.dumps(found[1:]))
    barrier()


if __name__ == "__main__":
    main()
