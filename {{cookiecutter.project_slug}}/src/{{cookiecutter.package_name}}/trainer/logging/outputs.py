"""Where a run's values go: the recorder, the progress bar and the loggers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .loggers import Logger
from .metrics import Recorder
from .progress import Progress


@dataclass
class Outputs:
    """Where a run's values go. Only the main process has loggers."""

    recorder: Recorder
    progress: Progress
    loggers: dict[str, Logger] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Log values and remember them."""
        if values:
            self.latest.update(values)
            for logger in self.loggers.values():
                logger.write(step, epoch, values)
