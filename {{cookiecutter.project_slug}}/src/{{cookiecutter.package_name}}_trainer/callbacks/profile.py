"""Record where the time of some steps goes."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from torch.profiler import profile, schedule

from ..errors import ConfigurationError
from ..module import Run, TrainingModule
from .callback import Callback


class Profile(Callback):
    """Record where the time of some steps goes, with torch's profiler.

    It writes a Chrome trace per rank into ``profile`` of the run directory: ``rank-00000.json``,
    and ``rank-00000-2.json`` if the schedule repeats. Open it in https://ui.perfetto.dev or
    ``chrome://tracing``. Steps are counted from the start of this fit, also if it resumes. After
    the last recorded step, the profiler is stopped and costs nothing.

    Args:
        wait: Number of optimizer steps to skip first.
        warmup: Number of steps to trace and discard: the first traced steps are slower.
        active: Number of steps to record.
        repeat: Number of times to do this.
        ranks: Ranks that record; ``None``: all.
        record_shapes: Record the shapes of inputs.
        profile_memory: Record allocations.
        with_stack: Record source lines, which makes steps much slower.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: https://docs.pytorch.org/docs/stable/profiler.html
    """

    def __init__(
        self,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        ranks: Sequence[int] | None = (0,),
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        least = {"wait": (wait, 0), "warmup": (warmup, 0), "active": (active, 1)}
        problems = [
            f"Profile: {name}={value!r}: give at least {smallest}"
            for name, (value, smallest) in (least | {"repeat": (repeat, 1)}).items()
            if value < smallest
        ]
        if ranks is not None and (not ranks or min(ranks) < 0):
            problems.append(f"Profile: ranks={ranks!r}: give ranks from 0 on, or None for all")
        if problems:
            raise ConfigurationError(problems)
        self.ranks = ranks
        self._schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._steps = (wait + warmup + active) * repeat
        self._records: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: profile | None = None

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        if self.ranks is not None and max(self.ranks) >= trainer.world_size:
            there = f"there are {trainer.world_size} ranks, counted from 0"
            raise ConfigurationError(f"Profile: ranks={list(self.ranks)!r}: {there}")
        if self.ranks is not None and trainer.global_rank not in self.ranks:
            return
        directory, rank = trainer.run_directory / "profile", trainer.global_rank
        numbers = count(1)

        def write(profiler: profile) -> None:
            directory.mkdir(exist_ok=True)
            number = next(numbers)
            name = f"rank-{rank:05d}" + (f"-{number}" if number > 1 else "")
            profiler.export_chrome_trace(str(directory / f"{name}.json"))

        self._profiler = profile(
            schedule=schedule(**self._schedule), on_trace_ready=write, **self._records
        )
        self._profiler.start()

    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        if self._profiler is not None:
            self._profiler.step()
            if self._profiler.step_num == self._steps:
                self.on_fit_end(trainer, module)

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        self.on_fit_end(trainer, module)
