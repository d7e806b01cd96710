"""Models and data that fail on one rank in one way; named by class path in test_faults.py."""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.checkpoint import writing
from torch import Tensor

from my_project.tasks import image_classifier as classifier


class Fails(classifier.ImageClassifier):
    """Fails in a training step on one rank, and writes down when.

    ``fault``: name of a function of this file; ``late``: a rank that comes 12 s later to that step.
    """

    def __init__(
        self, fault: str, rank: int = 1, step: int = 2, late: int | None = None, epoch: int = 0
    ) -> None:
        super().__init__()
        self.fault, self.rank, self.step, self.late = fault, rank, step, late
        self.epoch = epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Path(f"rank-{self.global_rank}").write_text(str(os.getpid()))
        if (self.current_epoch, batch_idx) == (self.epoch, self.step):
            if self.global_rank == self.late:
                time.sleep(12)
            if self.global_rank == self.rank:
                Path("struck").write_text(str(time.time()))
                FAULTS[self.fault]()
        return super().training_step(batch, batch_idx)


class ForwardsAlone(Fails):
    def __init__(self, fault: str, rank: int = 1) -> None:
        super().__init__(fault, rank, step=-1)
        self.norm = torch.nn.BatchNorm1d(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.norm(torch.randn(4, 3)).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == self.rank:
            Path("struck").write_text(str(time.time()))
            self.norm(torch.randn(4, 3))


class FailsWhileSaving(Fails):
    """Fails while a checkpoint is written, which ends only if somebody writes into a FIFO."""

    def on_fit_start(self) -> None:
        if self.global_rank == self.rank:
            self.saves = threading.Event()
            os.mkfifo("fifo")
            writing._write_rank = self.write

    def write(self, *arguments: Any) -> Any:
        self.saves.set()
        Path("fifo").read_text()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.step and self.global_rank == self.rank:
            self.saves.wait()
        return super().training_step(batch, batch_idx)


class NeverComes(classifier.ImageClassifier):
    """One rank hangs before it has reached the trainer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        if os.environ.get("RANK") == str(rank):
            Path("struck").write_text(str(time.time()))
            time.sleep(1000)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loops() -> None:
    while True:
        pass


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)


def faults() -> None:
    ctypes.string_at(0)


def aborts() -> None:
    time.sleep(1)
    os.abort()


def exits() -> None:
    sys.exit(0)


def leaves() -> None:
    os._exit(0)


def changes_the_directory() -> None:
    Path("elsewhere").mkdir(exist_ok=True)
    os.chdir("elsewhere")


def exits_with_3() -> None:
    sys.exit(3)


def raises() -> None:
    raise ArithmeticError("planted")


def raises_and_ends_late() -> None:
    # Longer than its peers wait for a failure that they do not see.
    atexit.register(time.sleep, 12)
    raises()


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(is_killed, is_stopped, loops, holds_the_interpreter, faults, aborts, exits, exits_with_3),
        *(leaves, changes_the_directory, raises, raises_and_ends_late),
    )
}


class UnevenBatches(trainer.DataModule):
    """A list of batches of digits' size; rank 0 has one more than each other rank."""

    def train_dataloader(self) -> list[tuple[Tensor, Tensor]]:
        batch = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
        return [batch] * (5 if int(os.environ["RANK"]) == 0 else 4)
