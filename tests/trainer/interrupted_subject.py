"""A model that takes its time when it is tested; named by class path in test_interruption.py."""

import time
from pathlib import Path
from typing import Any

from my_project.tasks import image_classifier as classifier


class SlowTest(classifier.ImageClassifier):
    """Writes down that the test has begun, and rests in each step."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        Path(f"testing-{self.global_rank}").touch()
        time.sleep(60)
