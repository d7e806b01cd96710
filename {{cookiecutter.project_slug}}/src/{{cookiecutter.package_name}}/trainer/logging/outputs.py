"""Outputs of a run: the recorder, the progress bar and the loggers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .loggers import Logger
from .metrics import Recorder
from .progress import Progress


@dataclass
class Outputs:
    """Outputs of a run. Only the main rank has loggers."""

    recorder: Recorder
    progress: Progress
    loggers: dict[str, Logger] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write values to the loggers, and keep them as the run's latest values."""
        if values:
            self.latest.update(values)
            for logger in self.loggers.values():
                logger.write(step, epoch, values)
