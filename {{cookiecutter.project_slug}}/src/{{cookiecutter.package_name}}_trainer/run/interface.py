"""What a module and callbacks see of a run: their ``trainer``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..data import scaling
from ..logging import Recorder
from ..loop import FitLoop, ManualOptimization, Position
from ..module import Weights
from .console import Console
from .plan import Plan


class RunInterface:
    """The state of a rank's run, and the interface :class:`~..module.Run` to it.

    Args:
        plan: The run's.
        console: Prints what the run reports.
    """

    _recorder: Recorder
    """Created when the rank has joined the process group."""
    log: Callable[..., None]

    def __init__(self, plan: Plan, console: Console) -> None:
        self.plan = plan
        self.strategy = plan.strategy
        self.directory: Path | None = None
        self.manual: ManualOptimization | None = None
        self.schedulers: list[Any] = []
        """The schedulers of ``configure_optimizers``."""
        self._console = console
        self._metrics: dict[str, float] = {}
        self._position = Position()
        self._loop: FitLoop | None = None
        self._steps_per_epoch: int | None = None
        self.read_sample: Callable[[], Any] | None = None

    @property
    def global_step(self) -> int:
        """Number of optimizer steps; of batches, in manual optimization."""
        return self._position.global_step

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._position.epoch

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch of this training step is the epoch's last."""
        return self._recorder.context.ends_epoch

    @property
    def batch_samples(self) -> int:
        """Samples of the current batch that count; 0 for a padding batch."""
        return self._recorder.context.samples

    @property
    def dataloader_name(self) -> str:
        """Name of the batch's loader in an evaluation; ``""`` if loaders are not in a dict."""
        return self._recorder.context.loader

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        return self.plan.layout.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.plan.layout.world_size

    @property
    def data_replicas(self) -> int:
        """Number of data-parallel replicas."""
        return self.strategy.data.replicas

    @property
    def data_index(self) -> int:
        """Index of this process' data-parallel replica, whose ranks read the same batches."""
        return self.strategy.data.index

    @property
    def seed(self) -> int:
        """Seed of data order, workers, augmentation and weights."""
        return self.plan.options.seed

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.plan.layout.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is global rank 0."""
        return self.plan.layout.is_main

    @property
    def run_directory(self) -> Path:
        """The run directory of the fit."""
        if self.directory is None:
            raise RuntimeError("trainer.run_directory is available during a fit only")
        return self.directory

    @property
    def total_steps(self) -> int | None:
        """Number of optimizer steps of the whole fit; ``None`` if it is not known in advance."""
        options, extra = self.plan.options, self._position.extra_steps
        epochs, steps = options.max_epochs, options.max_steps
        return scaling.total_steps(self._steps_per_epoch, epochs, steps, extra)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest logged value of each name, the same on every rank."""
        return self._metrics if self._loop is None else self._loop.fit.outputs.latest

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested on this rank; setting it to True is :meth:`stop`."""
        return self._fit_loop("should_stop").preemption.has_requested_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop("should_stop was set")

    def stop(self, reason: str = "") -> None:
        """Ask all ranks to end the fit, and print the reason; other ranks print it to their log."""
        self._fit_loop("stop").preemption.request_stop()
        line = f"stop requested in step {self.global_step}{reason and f': {reason}'}"
        if self.is_global_zero:
            self._console.note(line)
        else:
            print(line, flush=True)

    def save_checkpoint(self, then: Callable[[Path], None]) -> None:
        """Save a checkpoint after the current step, if there is none; all ranks call it."""
        self._fit_loop("save_checkpoint").after_save.append(then)

    def measure(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Log what a function returns with the speed of each logged step."""
        self._fit_loop("measure").fit.outputs.measurements.append(read)

    def weights(self) -> Weights:
        """The parameters in this process, to average them."""
        return self.strategy.weights()

    def has_skipped_step(self) -> bool:
        """Whether a step was skipped since the last call, because gradients were not finite."""
        return self.strategy.precision.has_skipped_step()

    def _fit_loop(self, name: str) -> FitLoop:
        if self._loop is None:
            raise RuntimeError(f"trainer.{name}() is available during a fit only")
        return self._loop
