"""Models and data that fail on one rank in one way; named by class path in test_faults.py."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .project import load, trainer

classifier = load("tasks.image_classifier")


class Fails(classifier.ImageClassifier):
    """Fails in a training step on one rank, and writes down when.

    Args:
        fault: what happens, by the name of a function of this file.
        rank: on which.
        step: in which.
    """

    def __init__(self, fault: str, rank: int = 1, step: int = 2) -> None:
        super().__init__()
        self.fault, self.rank, self.step = fault, rank, step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Path(f"rank-{self.global_rank}").write_text(str(os.getpid()))
        if self.global_rank == self.rank and batch_idx == self.step:
            Path("struck").write_text(str(time.time()))
            FAULTS[self.fault]()
        return super().training_step(batch, batch_idx)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    # Whoever asks for its stack lets it go on; it is to hang nevertheless.
    loops()


def loops() -> None:
    while True:
        pass


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)


def exits() -> None:
    sys.exit(0)


def raises() -> None:
    raise ArithmeticError("planted")


def waits() -> None:
    time.sleep(1000)


FAULTS = {
    each.__name__: each
    for each in (is_killed, is_stopped, loops, holds_the_interpreter, exits, raises, waits)
}


class UnevenBatches(trainer.DataModule):
    """A list of batches of digits' size; rank 0 has one more than each other rank."""

    def train_dataloader(self) -> list[tuple[Tensor, Tensor]]:
        batch = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
        return [batch] * (5 if int(os.environ["RANK"]) == 0 else 4)
