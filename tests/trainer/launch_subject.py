"""Models of digits that misbehave, wait or have secrets; named by class path."""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from my_project.tasks import image_classifier as classifier


class RaisesOnOneRank(classifier.ImageClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            Path("raised").write_text(str(time.time()))
            raise ArithmeticError("planted on rank 1")
        return super().training_step(batch, batch_idx)


class Sleeps(classifier.ImageClassifier):
    """Stays in its first step, for someone to look at its sockets."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Path(f"rank-{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(60)
        return super().training_step(batch, batch_idx)


class SlowTest(classifier.ImageClassifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        Path(f"testing-{self.global_rank}").touch()
        time.sleep(60)


class Secretive(classifier.ImageClassifier):
    def __init__(self, token: str = "", pin_key: int = 0, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
