"""One rank of a measurement of checkpoints: saves and resumes, or stalls of training."""

import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.checkpoint import tensor_files
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.writing import Checkpoints
from my_project_trainer.loop.fit import FitLoop
from my_project_trainer.strategies.base import Strategy
from my_project_trainer.strategies.optimizers import Optimization
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam, Optimizer

import meter
from child import argument, end_with
from memory_rank import GPT
from rounds import ordered
from subjects import load_lazily_loaded

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
# The trainer's, one that sums nothing, and torch's with so many threads of its writer.
TRAINER, UNSUMMED = "trainer", "trainer, no checksums"
TORCH, TORCH_2 = "torch, threads: 1", "torch, threads: 2"
NO_SUMS = SimpleNamespace(crc32=lambda piece, crc32: 0)
STEP = "step-00000001"
SAVES = 4  # of a fit; the first one touches the memory of its copies


@dataclass(frozen=True)
class Job:
    """Saves and resumes in a folder on the disk that is measured, or stalls of a `model`.

    What is saved are equal square matrices, sharded over all ranks by FSDP if there are several.
    """

    folder: str
    rounds: int
    width: int = 0
    tensors: int = 0
    contestants: Sequence[str] = (TRAINER, TORCH, TORCH_2)
    model: str = ""

    @property
    def parameters(self) -> int:
        """Numbers in the matrices."""
        return self.tensors * self.width**2


def seconds_of(what: Callable[[], Any]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def barrier() -> None:
    """Wait for all ranks."""
    if WORLD_SIZE > 1:
        dist.barrier()


class Model(TrainingModule):
    """Matrices without a forward: nothing is trained."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        for index in range(job.tensors):
            matrix = torch.empty(job.width, job.width, device="meta")
            self.register_parameter(f"matrix_{index}", nn.Parameter(matrix))


class Rank:
    """This rank's share of a model and of Adam's moments, in memory from the start."""

    def __init__(self, job: Job) -> None:
        self.job, self.folder = job, Path(job.folder)
        self.module = Model(job)
        if WORLD_SIZE > 1:
            fully_shard(self.module)
        self.module.to_empty(device="cpu")
        self.strategy = Strategy()
        self.strategy.module = self.module
        self._fill(list(self.module.parameters()))
        self.optimizer: Optimizer = Adam(self.module.parameters())
        self._create_moments(step=1.0)
        for moments in self.optimizer.state.values():
            self._fill([moments["exp_avg"], moments["exp_avg_sq"]])

    @torch.no_grad()
    def _fill(self, tensors: list[Any]) -> None:
        """Fill tensors with values that differ from rank to rank."""
        for index, tensor in enumerate(tensors):
            generator = torch.Generator().manual_seed(RANK * len(tensors) + index)
            torch.nn.init.uniform_(local(tensor), generator=generator)

    def _create_moments(self, step: float) -> None:
        for parameter in self.module.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(step),
                "exp_avg": torch.empty_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.empty_like(parameter, requires_grad=False),
            }

    def state(self) -> dict[str, Any]:
        """The state that both save: by parameter name, sharded."""
        return self.strategy.state(Optimization([self.optimizer], []))

    def save(self, name: str) -> Callable[[], Any]:
        """Return a save by a contestant, after what is not measured."""
        path, state = self.folder / name, self.state()
        if name == TRAINER:
            return lambda: Checkpoints(path).save(1, state, {})
        if name == UNSUMMED:
            unsummed = mock.patch.object(tensor_files, "zlib", NO_SUMS)
            return lambda: unsummed(Checkpoints(path).save)(1, state, {})
        writer = dcp.FileSystemWriter(path, thread_count=int(name[-1]))
        return lambda: dcp.save(state, storage_writer=writer)

    def resume(self, name: str) -> Callable[[], None]:
        """Return a resume, without the moments that the optimizer had; parameters are zeros."""
        for parameter in self.module.parameters():
            parameter.data.zero_()
        self.optimizer.state.clear()
        path = self.folder / name
        return lambda: self._by_trainer(path) if name == TRAINER else self._by_torch(path)

    def _by_trainer(self, path: Path) -> None:
        """Verify this rank's share of the checksums, as a run does before it resumes; and load."""
        checkpoint = Checkpoint(path / STEP)
        self.verified = seconds_of(lambda: checkpoint.check_contents(RANK, WORLD_SIZE))
        saved = Checkpoint(path / STEP).stored_state()
        self.strategy.load_state(saved, Optimization([self.optimizer], []))

    def _by_torch(self, path: Path) -> None:
        """Load in place, into moments of which only the memory is new."""
        self._create_moments(step=0.0)
        dcp.load(self.state(), storage_reader=dcp.FileSystemReader(path))

    def one_round(self, number: int) -> dict[str, dict[str, float]]:
        """Save by all contestants, then resume; files of torch's variants are the same."""
        names = ordered(self.job.contestants, number)
        costs = {f"save, {name}": measured(self.save(name)) for name in names}
        saved = self.sums()
        for name in (name for name in names if name in (TRAINER, TORCH)):
            costs[f"resume, {name}"] = measured(self.resume(name))
            if self.sums() != saved:
                raise SystemExit(f"{name}: what was loaded is not what was saved")
        costs["verify"] = {"seconds": self.verified}
        barrier()
        if WORLD_SIZE == 1:
            checkpoint = Checkpoint(self.folder / TRAINER / STEP)
            costs["open"] = measured(checkpoint.stored_state)
        if RANK == 0:
            for name in names:
                shutil.rmtree(self.folder / name)
        barrier()
        return costs

    def sums(self) -> list[float]:
        """A sum of each tensor's values on this rank."""
        tensors: list[Any] = list(self.module.parameters())
        for values in self.optimizer.state.values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        return [float(local(tensor).detach().double().sum()) for tensor in tensors]


def local(tensor: Any) -> Tensor:
    """This rank's shard of a tensor, or a tensor that is not sharded."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def measured(what: Callable[[], Any]) -> dict[str, float]:
    """Seconds until all ranks are done; this rank's CPU seconds and peak of memory, in MiB."""
    gc.collect()
    before = meter.resident()
    meter.forget_peak()
    barrier()
    started, cpu = time.perf_counter(), time.process_time()
    what()
    cpu = time.process_time() - cpu  # not that of waiting for others
    barrier()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu": cpu, "added": meter.peak() - before}


def resumes(job: Job) -> list[dict[str, dict[str, float]]]:
    """What this rank needs for saves and resumes, in each round."""
    load_lazily_loaded()
    rank = Rank(job)
    # The first round imports, and touches memory for the first time.
    return [rank.one_round(number) for number in range(job.rounds + 1)][1:]


def stalls(job: Job) -> list[dict[str, dict[str, float]]]:
    """How long a save holds up training, synchronous and asynchronous ones, in each round.

    A stall is the time of a save until training continues, and the time for which the optimizer
    of the next step waits. A save that starts before the last one is complete waits for it, which
    is not counted: in a run, saves are less frequent.
    """
    torch.set_num_threads(2)
    seconds: list[float] = []
    save_once = FitLoop._save_once

    def save(loop: FitLoop) -> None:
        if loop.fit.position.saved_at != loop.fit.position.global_step:
            loop.checkpoints.wait()
            seconds.append(seconds_of(lambda: save_once(loop)))

    def stall(is_asynchronous: bool) -> dict[str, float]:
        seconds.clear()
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=2 * SAVES,
            run_name="run",
            loggers=[],
            enable_progress_bar=False,
            default_root_dir=Path(job.folder),
            checkpoint_every_n_steps=2,
            async_checkpoints=is_asynchronous,
        )
        trainer.fit(GPT(job.model))
        shutil.rmtree(Path(job.folder) / "run")
        first, *others = seconds[:SAVES]
        return {"first": first, "others": sum(others) / len(others)}

    with mock.patch.object(FitLoop, "_save_once", save):
        return [
            {name: stall(name == "async") for name in ordered(("async", "sync"), number)}
            for number in range(job.rounds)
        ]


def main() -> None:
    job = Job(**argument())
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if WORLD_SIZE > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    rounds = stalls(job) if job.model else resumes(job)
    barrier()
    end_with(rounds)


if __name__ == "__main__":
    main()
