"""Record where the time of some steps goes."""

from collections.abc import Sequence
from functools import partial

from torch.profiler import profile, schedule, tensorboard_trace_handler

from ..errors import ConfigurationError
from ..module import Run, TrainingModule
from .callback import Callback, check


class Profile(Callback):
    """Record where the time of some steps goes, with torch's profiler.

    It writes a Chrome trace per rank, and per repetition of the schedule, into ``profile`` of the
    run directory: ``rank-00000.TIME.pt.trace.json``. Open it in https://ui.perfetto.dev or
    ``chrome://tracing``. Steps are counted from the start of this fit, also if it resumes. After
    the last recorded step, the profiler is stopped and costs nothing.

    Args:
        wait: Number of optimizer steps to skip first.
        warmup: Number of steps to trace and discard: the first traced steps are slower.
        active: Number of steps to record.
        repeat: Number of times to do this.
        ranks: Ranks that record; ``None``: all.
        record_shapes, profile_memory, with_stack: As of ``torch.profiler.profile``.

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
        least |= {"repeat": (repeat, 1)}
        are_ranks = ranks is None or (bool(ranks) and min(ranks) >= 0)
        check(
            "Profile",
            *((own >= n, f"{name}={own!r}: give at least {n}") for name, (own, n) in least.items()),
            (are_ranks, f"ranks={ranks!r}: give ranks from 0 on, or None for all"),
        )
        self.ranks = ranks
        self._steps = (wait + warmup + active) * repeat
        self._schedule = partial(schedule, wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._create = partial(
            profile,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
        )
        self._profiler: profile | None = None

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        ranks = range(trainer.world_size) if self.ranks is None else self.ranks
        if max(ranks) >= trainer.world_size:
            there = f"there are {trainer.world_size} ranks, counted from 0"
            raise ConfigurationError(f"Profile: ranks={list(ranks)!r}: {there}")
        if trainer.global_rank in ranks:
            folder, name = trainer.run_directory / "profile", f"rank-{trainer.global_rank:05d}"
            write = tensorboard_trace_handler(str(folder), name)
            self._profiler = self._create(schedule=self._schedule(), on_trace_ready=write)
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
