"""Outputs of a run: the recorder, the progress bar and the loggers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .loggers import Logger
from .metrics import Recorder
from .progress import Progress


@dataclass
class Outputs:
    """Outputs of a run. Only the main rank has loggers.

    ``latest``: latest value of each name; ``validated``: values of the last validation;
    ``epoch_values``: values of a completed epoch, until they are written; ``last_values``: values
    of the last step, if it is logged only because training ends with it; ``log_positions``:
    position of each log in the resumed checkpoint.
    """

    recorder: Recorder
    progress: Progress
    loggers: dict[str, Logger] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    epoch_values: dict[str, float] = field(default_factory=dict)
    last_values: dict[str, float] = field(default_factory=dict)
    log_positions: dict[str, int] = field(default_factory=dict)

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write values to the loggers, and keep them as the run's latest values."""
        if values:
            self.latest.update(values)
            for logger in self.loggers.values():
                logger.write(step, epoch, values)

    def log_to(self, loggers: dict[str, Logger], resumed_at: int | None) -> None:
        """Write values to loggers from now on.

        Args:
                loggers: Loggers by name.
                resumed_at: Step after which their logs are continued; ``None``: new logs.
        """
        self.loggers = loggers
        if resumed_at is None:
            return
        for name, logger in loggers.items():
            logger.resume(self.log_positions.get(name), resumed_at)

    def close(self) -> None:
        """Close the loggers."""
        for logger in self.loggers.values():
            logger.close()
