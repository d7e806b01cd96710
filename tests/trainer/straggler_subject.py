"""The digits' classifier with one slow rank; named by class path."""

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from my_project.tasks import image_classifier as classifier

SLOW_RANK = 3


class Straggler(classifier.ImageClassifier):
    """Writes down on rank 0 when an epoch begins.

    Args:
        seconds: that the slow rank sleeps in each step.
    """

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self.seconds = seconds

    def on_train_epoch_start(self) -> None:
        if self.global_rank == 0:
            with Path("epochs").open("a") as file:
                file.write(f"{time.monotonic()}\n")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == SLOW_RANK:
            time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)
