"""A model whose steps take long enough to be interrupted; named by class path."""

import time
from typing import Any

from torch import Tensor

from .project import load

classifier = load("tasks.image_classifier")


class Slow(classifier.ImageClassifier):
    """Rests in each training step.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)
