"""Outputs of a run: the recorder, the progress bar and the loggers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import lost_worker, one_line
from ..launch import output
from ..launch.signals import Preempted
from ..options import redaction
from .logger import LoggedRun, Logger, Outcome
from .metrics import Recorder
from .progress import Progress

T = TypeVar("T")


@dataclass
class Outputs:
    """Outputs of a run. Only the main rank has loggers.

    ``last_values``: of the last step, if it is logged only because training ends with it;
    ``measurements``: functions whose values are written with the speed; ``fresh``: names of the
    values that were computed since each kind of consumer has acted on them: schedulers by step and
    by epoch, and ``on_validation_end``.
    """

    recorder: Recorder
    progress: Progress
    loggers: dict[str, Logger] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)  # of each name
    validated: dict[str, float] = field(default_factory=dict)  # by the last validation
    epoch_values: dict[str, float] = field(default_factory=dict)  # until they are written
    last_values: dict[str, float] = field(default_factory=dict)
    log_positions: dict[str, int] = field(default_factory=dict)  # in the resumed checkpoint
    measurements: list[Callable[[], Mapping[str, float]]] = field(default_factory=list)
    check: Callable[[], object] = bool  # raises an error if nothing may be written any more
    fresh: dict[str, set[str]] = field(
        default_factory=lambda: {"step": set(), "epoch": set(), "validation": set()}
    )

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write values to the loggers, and keep them as the run's latest values."""
        if values:
            self.check()
            self.latest.update(values)
            for names in self.fresh.values():
                names.update(values)
            self._call_all(lambda _, logger: logger.write(step, epoch, values))

    def write_epoch(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write the values of an epoch; the latest ``loss`` becomes ``loss_epoch``."""
        self.write(step, epoch, values)
        self.show_epoch(values)
        for kind in ("epoch", "validation") if values else ():
            self.fresh[kind].update(name.removesuffix("_epoch") for name in values)

    def show_epoch(self, values: Mapping[str, float]) -> None:
        """Keep the values of an epoch as the run's latest values."""
        self.latest |= {name.removesuffix("_epoch"): values[name] for name in values} | dict(values)

    def take_fresh(self, kind: str) -> dict[str, float]:
        """The latest values that a kind of consumer has not seen yet; each is returned once."""
        values = {name: self.latest[name] for name in sorted(self.fresh[kind])}
        self.fresh[kind].clear()
        return values

    def write_speed(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write the speed of training, and other measurements; they are no result of the run."""
        if not self.loggers:
            return
        self.check()
        measured = dict(values)
        for read in self.measurements:
            measured |= read()
        self._call_all(lambda _, logger: logger.write_speed(step, epoch, measured))

    def log_to(self, loggers: Mapping[str, Logger], run: LoggedRun, resumed_at: int | None) -> None:
        """Write values to loggers from now on; ``resumed_at``: the step of a resumed checkpoint."""
        self.loggers = dict(loggers)
        self._call_all(lambda _, logger: logger.start(run))
        if resumed_at is not None:
            positions = self.log_positions
            self._call_all(lambda name, logger: logger.resume(positions.get(name), resumed_at))

    def positions(self) -> dict[str, int]:
        return self._call_all(lambda _, logger: int(logger.position()))

    def close(self, error: BaseException | None = None) -> None:
        """Close each logger once, which learns by what the fit has ended; ``None``: it finished."""

        def end(name: str, logger: Logger) -> None:
            logger.close()
            del self.loggers[name]  # one that a lost worker has interrupted is closed again

        stopped: Outcome = "preempted" if isinstance(error, Preempted) else "stopped"
        for logger in self.loggers.values():
            is_failure = isinstance(error, Exception)
            logger.outcome = "failed" if is_failure else stopped if error else "finished"
        self._call_all(end)

    def _call_all(self, call: Callable[[str, Logger], T]) -> dict[str, T]:
        """Call all loggers; one that raises is not called any more, which is said once."""
        results: dict[str, T] = {}
        lost: Exception | None = None
        for name, logger in list(self.loggers.items()):
            try:
                results[name] = call(name, logger)
            except Exception as error:  # a logger may raise anything
                if lost_worker(error):
                    lost = error  # not the logger's; raised when all were called
                    continue
                del self.loggers[name]
                reason = redaction.message(f"{type(error).__name__}: {one_line(error)}")
                line = f"warning: logger {name!r} is not used any more: it raised {reason}"
                output.print_lines(line, error=True)
        if lost is not None:
            raise lost
        return results
