"""Models that misbehave on one rank, and one that counts; named by class path in test_launch.py."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from my_project.tasks import digits
from my_project.tasks import image_classifier as classifier


class RaisesOnOneRank(classifier.ImageClassifier):
    """Rank 1 raises in its third step, and writes down when."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            Path("raised").write_text(str(time.time()))
            raise ArithmeticError("planted on rank 1")
        return super().training_step(batch, batch_idx)


class DiesOnOneRank(classifier.ImageClassifier):
    """Rank 1 is killed in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            Path("raised").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Sleeps(classifier.ImageClassifier):
    """Stays in its first step, for someone to look at its sockets."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Path(f"rank-{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(60)
        return super().training_step(batch, batch_idx)


class Counts(classifier.ImageClassifier):
    """Validates on all digits and counts them."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("count", torch.tensor(float(len(batch[0]))), reduce_fx="sum")


class AllDigits(trainer.DataModule):
    """All 1797 digits, to validate on."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(digits.DigitImages(), batch_size=50)
