"""What a module knows of the run that trains it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Manual(Protocol):
    """Interface of manual optimization for a training step."""

    @property
    def optimizers(self) -> Sequence[Any]: ...
    def backward(self, loss: Tensor) -> None: ...


class Weights(Protocol):
    """The parameters of a fit in this process, to average them.

    A part is a plain tensor: all of a parameter, or the shard or slice that this process holds.
    Elementwise operations on parts are therefore right under every strategy.
    """

    def trained(self) -> list[str]:
        """Names of the parameters that are trained now, of those in this process."""

    def parts(self, names: Iterable[str]) -> list[Tensor]:
        """This process' parts of parameters: not copies, and not to be modified."""

    def put(self, parts: Mapping[str, Tensor]) -> None:
        """Overwrite parameters with parts, in the parameters' data type; all ranks call it."""

    def state(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        """Convert parts to what a checkpoint contains, as of the weights; all ranks call it."""

    def load(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Read parts from a state of :meth:`state` of any strategy."""


class Run(Protocol):
    """A run, as a module and callbacks see it: their ``trainer``."""

    log: Callable[..., None]
    read_sample: Callable[[], Any] | None
    """Reads a training batch on the CPU, before a fit; all ranks call it."""

    @property
    def global_step(self) -> int: ...
    @property
    def current_epoch(self) -> int: ...
    @property
    def is_last_batch(self) -> bool: ...
    @property
    def batch_samples(self) -> int: ...
    @property
    def dataloader_name(self) -> str: ...
    @property
    def schedulers(self) -> Sequence[Any]: ...
    @property
    def manual(self) -> Manual | None: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def world_size(self) -> int: ...
    @property
    def data_replicas(self) -> int: ...
    @property
    def data_index(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def run_directory(self) -> Path:
        """The run directory of the fit."""

    @property
    def total_steps(self) -> int | None:
        """Number of optimizer steps of the whole fit; ``None`` if it is not known in advance."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The latest logged value of each name, the same on every rank.

        At the end of an epoch, ``NAME`` is ``NAME_epoch``, the value over the epoch.
        """

    def measure(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Log what a function returns with the speed of each logged step of this fit.

        It is called on rank 0, which trains, so it must return at once. Unlike values of
        :meth:`log`, these may differ from run to run; they are not among :attr:`metrics`.
        """

    def weights(self) -> Weights:
        """The parameters in this process, from ``on_fit_start`` on.

        A callback that uses them has ``needs = ("parameter_averaging",)``. Keep none after the fit.
        """

    def has_skipped_step(self) -> bool:
        """Whether a step was skipped since the last call, because gradients were not finite.

        The same on all ranks. With a gradient scaler, it waits for the device.
        """

    def stop(self, reason: str = "") -> None:
        """End the fit as if it had reached ``max_steps``: it is saved and validated.

        Any rank may call it. All ranks stop after the same step: at once if called in a
        validation's or an epoch's hook, otherwise within about a second.
        """

    def save_checkpoint(self, then: Callable[[Path], None]) -> None:
        """Save a checkpoint after the current step, if there is none; all ranks call it.

        Args:
            then: Called on every rank with the directory of the checkpoint when it is complete.
                It is saved when the other hooks of this moment have been called, so that it
                contains their state.
        """


class Shard(Protocol):
    """A parameter of which this process has only a slice, left by an engine."""

    def make_whole(self) -> None: ...


@dataclass(frozen=True)
class TrainerState:
    """The trainer's state of a module: the only attribute that it sets on the module.

    ``run``: the current run; ``None`` outside of a run. ``device``: of parameters, buffers and
    batches. ``samples``: default ``batch_size`` of logged values; ``None``: that of the batch.
    ``shards``: parameters that are still slices after a run. ``weights``: by name, the values of
    parameters that are on the meta device until a strategy allocates them.
    """

    run: Run | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    samples: int | None = None
    shards: Sequence[Shard] = ()
    weights: Mapping[str, Any] = field(default_factory=dict)
