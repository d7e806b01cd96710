"""What a module, its callbacks and a script know of a run."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import instead, missing
from ..launch.cluster import Layout
from ..logging import Recorder
from ..options import Options
from .hooks import DataHooks


class RunFacts(NamedTuple):
    """Rank, step and epoch of a process in its run; the defaults are those outside of a run."""

    layout: Layout = Layout()
    global_step: int = 0
    epoch: int = 0
    replica: Callable[[], tuple[int, int]] = lambda: (1, 0)
    """Returns the number of data-parallel replicas, and the index of this process'."""


class RunProperties:
    """What a module, its ``trainer`` and the ``Trainer`` of a script have in common."""

    def _run_facts(self) -> RunFacts:
        return RunFacts()

    @property
    def global_rank(self) -> int:
        """The global rank of this process; 0 outside of a run."""
        return self._run_facts().layout.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node; 0 outside of a run."""
        return self._run_facts().layout.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes; 1 outside of a run."""
        return self._run_facts().layout.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is global rank 0, as it is outside of a run."""
        return self.global_rank == 0

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far, of batches in manual optimization; 0 outside."""
        return self._run_facts().global_step

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0; 0 outside of a run."""
        return self._run_facts().epoch

    @property
    def data_replicas(self) -> int:
        """Number of data-parallel replicas, which read different samples; 1 outside of a run."""
        return self._run_facts().replica()[0]

    @property
    def data_index(self) -> int:
        """Index of this process' data-parallel replica, whose ranks read the same batches."""
        return self._run_facts().replica()[1]


class OptionNames:
    """Trainer options as attributes; an unknown name raises AttributeError with a suggestion."""

    max_epochs: int | None
    max_steps: int | None
    fast_dev_run: bool | int
    enable_progress_bar: bool
    metrics: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if not {"plan", "_plan"}.isdisjoint(vars(self)) and name[0] != "_":
            if hasattr(Options, name):
                raise AttributeError(f"{name} cannot be changed: give it to Trainer({name}=…)")
            is_own = name in vars(self) or hasattr(type(self), name)
            is_own |= isinstance(self, Run) and name in Run.__annotations__
            advice = "" if is_own else instead("attribute", name)
            if advice or (not is_own and name in Run.__annotations__):
                raise AttributeError(f"{name} would have no effect{advice}")
        super().__setattr__(name, value)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest logged values as tensors, as Lightning has them."""
        return {name: torch.tensor(value) for name, value in self.metrics.items()}

    if not TYPE_CHECKING:  # so that type checkers know all names

        def __getattr__(self, name: str) -> Any:
            plan = self.__dict__.get("plan") or self.__dict__.get("_plan")
            if plan is not None and name[0] != "_" and hasattr(Options, name):
                return getattr(plan.options, name)
            known = [other for other in dir(type(self)) if other[0] != "_"]
            return missing(self, name, "attribute", known)


class Manual(Protocol):
    """Interface of manual optimization for a training step."""

    @property
    def optimizers(self) -> Sequence[Any]: ...
    def backward(self, loss: Tensor, retain_graph: bool) -> None: ...


class Weights(Protocol):
    """The parameters of a fit in this process, to average them.

    A shard is a plain tensor: what this process holds of a parameter, which may be all of it.
    Elementwise operations on shards are therefore right under every strategy.
    """

    def trained(self) -> list[str]:
        """Names of the parameters that are trained now, of those in this process."""

    def shards(self, names: Iterable[str]) -> list[Tensor]:
        """This process' shards of parameters: not copies, and not to be modified."""

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite this process' shards, in the parameters' data type; all ranks call it."""

    def state(self, shards: Mapping[str, Tensor]) -> dict[str, Any]:
        """Convert shards to what a checkpoint contains, as of the weights; all ranks call it."""

    def load(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Read shards from a state of :meth:`state` of any strategy."""


class Run(RunProperties, OptionNames, ABC):
    """A run, as a module and callbacks see it: their ``trainer``.

    The options of the trainer are attributes, too, such as ``max_epochs``.
    """

    seed: int
    """Seed of data order, workers, augmentation and weights."""
    total_steps: int | None
    """Number of optimizer steps of the whole fit; ``None`` if it is not known in advance."""
    metrics: Mapping[str, float]
    """The latest logged value of each name, the same on every rank. At the end of an epoch,
    ``NAME`` is ``NAME_epoch``, the value over the epoch."""
    fresh_metrics: Collection[str] = ()
    """In ``on_validation_end``: names of the values that were computed since the one before."""
    num_training_batches: int | float = math.inf
    """Micro-batches per epoch and replica; infinite if that is not known in advance."""
    datamodule: DataHooks | None = None
    optimizers: Sequence[Any] = ()
    """The optimizers of ``configure_optimizers``, or an engine's in their place."""
    callbacks: Sequence[Any] = ()
    """The callbacks of the fit."""
    schedulers: Sequence[Any] = ()
    """The schedulers of ``configure_optimizers``."""
    manual: Manual | None = None
    directory: Path | None = None
    read_sample: Callable[[], Any] | None = None
    """Reads a training batch on the CPU, before a fit; all ranks call it."""
    recorder: Recorder
    """Created when the rank has joined the process group, like ``log``, which is its method."""
    log: Callable[..., None]
    logger: Any
    """The first open :class:`~..logging.Logger` with an ``experiment``, for images, figures and
    text. Where none is, as on other ranks than 0 or in a test, calls of it do nothing."""
    weights: Callable[[], Weights]
    """Returns the parameters in this process, from ``on_fit_start`` on. A callback that uses them
    has ``needs = ("parameter_averaging",)``. Keep none after the fit."""
    has_skipped_step: Callable[[], bool]
    """Returns whether a step was skipped since the last call, because gradients were not finite.
    The same on all ranks. With a gradient scaler, it waits for the device."""

    is_in_sanity_check: bool = False
    has_read_sanity_check: bool = False

    @property
    def sanity_checking(self) -> bool:
        """Whether validation runs as the check before the first step."""
        self.has_read_sanity_check = True
        return self.is_in_sanity_check

    @property
    def estimated_stepping_batches(self) -> int | None:
        """:attr:`total_steps` by Lightning's name."""
        return self.total_steps

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch of this training step is the epoch's last."""
        return self.recorder.context.ends_epoch

    @property
    def batch_samples(self) -> int:
        """Samples of the current batch that count; 0 for a padding batch."""
        return self.recorder.context.samples

    @property
    def dataloader_name(self) -> str:
        """Name of the batch's loader in an evaluation; ``""`` if loaders are not in a dict."""
        return self.recorder.context.loader

    @property
    def run_directory(self) -> Path:
        """The run directory of the fit."""
        if self.directory is None:
            raise RuntimeError("trainer.run_directory is available during a fit only")
        return self.directory

    @abstractmethod
    def measure(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Log what a function returns with the speed of each logged step of this fit.

        It is called on rank 0, which trains, so it must return at once. Unlike values of
        :meth:`log`, these may differ from run to run; they are not among :attr:`metrics`.
        """

    @abstractmethod
    def stop(self, reason: str = "") -> None:
        """End the fit as if it had reached ``max_steps``: it is saved and validated.

        Any rank may call it; its reason is printed. All ranks stop after the same step: at once if
        called in a validation's or an epoch's hook, otherwise within about a second.
        """

    @abstractmethod
    def save_checkpoint(self, then: Callable[[Path], None]) -> None:
        """Save a checkpoint after the current step, if there is none; all ranks call it.

        Args:
            then: Called on every rank with the directory of the checkpoint when it is complete.
                It is saved when the other hooks of this moment have been called, so that it
                contains their state.
        """


@dataclass(frozen=True)
class TrainerState:
    """The trainer's state of a module: the only attribute that it sets on the module.

    ``weights``: by name, the values of parameters that are on the meta device until a strategy
    allocates them; ``None``: those of the checkpoint that is loaded then.
    """

    run: Run | None = None  # the current one
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # and of batches
    samples: float | None = None  # default ``batch_size`` of logs; ``None``: what the batch counts
    weights: Mapping[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle of a module keeps: it takes part in no run."""
        return {**vars(self), "run": None}
