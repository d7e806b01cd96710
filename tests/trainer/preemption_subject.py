"""A model whose steps take long enough to be interrupted; named by class path."""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from my_project.tasks import image_classifier as classifier


class Slow(classifier.ImageClassifier):
    """Rests in each training step, and writes down when it was made."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        with Path(f"steps-of-rank-{self.global_rank}").open("a") as file:
            file.write(f"{time.time()} {os.getpid()} {self.global_step}\n")
        return super().training_step(batch, batch_idx)


class Made(NamedTuple):
    """A training step of a rank: when it was made, by which process, after how many steps."""

    time: float
    process: int
    step: int


def steps_of(folder: Path, rank: int = 0) -> list[Made]:
    """What :class:`Slow` has written in a folder."""
    file = folder / f"steps-of-rank-{rank}"
    # A line that is just being written is left out.
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [Made(float(a), int(b), int(c)) for a, b, c in (line.split() for line in lines)]
