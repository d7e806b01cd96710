"""What the user writes: a module with its steps, and where its data comes from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .errors import UserError
from .logging.metrics import ReduceFx

Loader = Iterable[Any]


class Manual(Protocol):
    """What manual optimization gives a training step."""

    @property
    def optimizers(self) -> Sequence[Any]: ...
    def backward(self, loss: Tensor) -> None: ...


class Run(Protocol):
    """What a module may ask of the run that trains it; the trainer is one."""

    log: Callable[..., None]

    @property
    def global_step(self) -> int: ...
    @property
    def current_epoch(self) -> int: ...
    @property
    def is_last_batch(self) -> bool: ...
    @property
    def batch_samples(self) -> int: ...
    @property
    def schedulers(self) -> Sequence[Any]: ...
    @property
    def manual(self) -> Manual | None: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def seed(self) -> int: ...


class Shard(Protocol):
    """A parameter of which an engine has left this process a slice only."""

    def make_whole(self) -> None: ...


@dataclass(frozen=True)
class TrainerState:
    """What the trainer knows of a module: the one attribute that it sets on it.

    ``run``: that uses the module; ``None`` outside a run. ``device``: of parameters, buffers and
    batches. ``samples``: behind a value that is logged without a ``batch_size``; ``None``: those of
    the batch. ``shards``: of parameters that are still slices after a run.
    """

    run: Run | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    samples: int | None = None
    shards: Sequence[Shard] = ()


class DataModule:
    """Where batches come from. Overwrite the loaders you need; return a ``DataLoader`` each.

    The trainer puts in the samplers: training is shuffled anew each epoch, validation and test are
    in order and see each sample once, on any number of processes.
    """

    def train_dataloader(self) -> Loader | None:
        """Batches to train on."""
        return None

    def val_dataloader(self) -> Loader | None:
        """Batches to validate on."""
        return None

    def test_dataloader(self) -> Loader | None:
        """Batches to test on."""
        return None

    def predict_dataloader(self) -> Loader | None:
        """Batches to predict."""
        return None


class TrainingModule(nn.Module):
    """A model and how it is trained, without a word on devices, processes or precision.

    Overwrite :meth:`training_step` and :meth:`configure_optimizers`, and what else you need. A
    batch is on the module's device when a step sees it, and so are registered buffers; make new
    tensors from old ones (``x.new_zeros``) or on ``self.device``.

    The trainer sets one attribute, ``trainer_state`` (:class:`TrainerState`). Hooks, and another
    ``forward`` of parts that are compiled or checkpointed, are there while a run lasts; only the
    fully sharded strategies leave a module sharded.
    """

    automatic_optimization: bool = True
    """False: ``training_step`` calls ``manual_backward`` and steps its ``optimizers()`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer_state = TrainerState()

    # --- steps -----------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Loss of a batch: a scalar, the mean over its samples; or a dict with it as ``loss``.

        Under dp and ddp2, anything that ``training_step_end`` makes a loss of; with manual
        optimization, nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def training_step_end(self, outputs: Any) -> Any:
        """Sees what :meth:`training_step` returned: under dp and ddp2, of all device replicas."""
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Validate a batch; log what is worth knowing."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step")

    def validation_step_end(self, outputs: Any) -> Any:
        """As :meth:`training_step_end`, for validation."""
        return outputs

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Test a batch; log what is worth knowing."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step")

    def test_step_end(self, outputs: Any) -> Any:
        """As :meth:`training_step_end`, for tests."""
        return outputs

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Predictions for a batch; by default what ``forward`` gives for it."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """The optimizers, and schedulers if there are any.

        Returns:
            an optimizer; a list of them (each steps once a step); two lists, optimizers and
            schedulers; or a dict, or list of dicts, with ``optimizer`` and ``lr_scheduler``. A
            scheduler is stepped at the end of each epoch; ``{"scheduler": s, "interval": "step"}``
            steps it after each optimizer step, and ``"monitor": name`` hands it a logged value.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers")

    def initialize(self, name: str, layer: nn.Module) -> None:
        """Give a layer's parameters their first values, where the model was built without memory.

        Called for each layer that has parameters of its own, the module itself included (Trainer's
        ``meta_device``). By default its ``reset_parameters`` does it, as torch's layers have it.

        Args:
            name: of the layer, ``""`` for this module.
            layer: whose own parameters lie on the CPU, with arbitrary values.

        Raises:
            UserError: it has none.
        """
        reset: Callable[[], object] | None = getattr(layer, "reset_parameters", None)
        if reset is None:
            kind = type(layer).__name__
            raise UserError(
                f"meta_device: {type(self).__name__} does not say what {name or 'itself'} ({kind}) "
                f"begins with; overwrite initialize, or give {kind} a reset_parameters"
            )
        reset()

    # --- manual optimization -----------------------------------------------------------------

    def optimizers(self) -> Any:
        """The optimizers of ``configure_optimizers``, for a step with manual optimization.

        Returns:
            a :class:`~.manual_optimization.ManualOptimizer`, or a list of them. Each has
            ``step()``, ``zero_grad()``, ``clip_gradients(value)``, and ``toggle_model(
            sync_grad=True)``: a context in which only its own parameters get gradients.
        """
        optimizers = self._manual().optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def manual_backward(self, loss: Tensor) -> None:
        """Compute gradients of a loss and average them, unless toggled with ``sync_grad=False``."""
        self._manual().backward(loss)

    def lr_schedulers(self) -> Any:
        """The schedulers of ``configure_optimizers``; with manual optimization, step them here."""
        schedulers = self.trainer.schedulers
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def _manual(self) -> Manual:
        if self.trainer.manual is None:
            if not self.automatic_optimization:
                raise RuntimeError("optimizers are there in training_step alone")
            name = type(self).__name__
            raise RuntimeError(f"{name}: set automatic_optimization = False to optimize by hand")
        return self.trainer.manual

    # --- data, where it is not a DataModule's ------------------------------------------------

    def train_dataloader(self) -> Loader | None:
        """Batches to train on, where no data module is given."""
        return None

    def val_dataloader(self) -> Loader | None:
        """Batches to validate on, where no data module is given."""
        return None

    def test_dataloader(self) -> Loader | None:
        """Batches to test on, where no data module is given."""
        return None

    def predict_dataloader(self) -> Loader | None:
        """Batches to predict, where no data module is given."""
        return None

    # --- moments ----------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Called once the module stands on its device, before the first step."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch; not when an epoch is resumed in its middle."""

    def on_train_epoch_end(self) -> None:
        """Called after the last batch of an epoch, before its values are reduced."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch, before its values are reduced."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch, before its values are reduced."""

    # --- what the run tells -----------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        sync_dist: bool = True,
        reduce_fx: ReduceFx = "mean",
        batch_size: int | None = None,
    ) -> None:
        """Log a number, a scalar tensor, or a torchmetrics metric.

        Args:
            name: what it is called in logs and in the progress bar.
            value: kept on its device; nothing waits for it until it is shown.
            on_step: log single steps; default in training. With gradient accumulation, a step's
                value is reduced over its micro-batches.
            on_epoch: log the reduction over the epoch; default in validation and test.
            prog_bar: show it in the progress bar.
            sync_dist: reduce over all processes, each sample counted once, so that every process
                has the same value. Every process must then log it. False: this process' own.
            reduce_fx: ``"mean"`` (weighted by samples), ``"sum"``, ``"min"`` or ``"max"``.
            batch_size: samples behind the value; by default those of the batch.

        A metric is computed and reset at the end of the epoch; it synchronizes itself.
        Outside a run (a step called by hand), nothing happens.
        """
        run, samples = self.trainer_state.run, self.trainer_state.samples
        if run is not None:
            samples = samples if batch_size is None else batch_size
            run.log(name, value, on_step, on_epoch, prog_bar, sync_dist, reduce_fx, samples)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """:meth:`log` each entry, all with the same options."""
        for name, value in values.items():
            self.log(name, value, **options)

    @property
    def trainer(self) -> Run:
        """The run that trains this module.

        Raises:
            RuntimeError: there is none.
        """
        if self.trainer_state.run is None:
            raise RuntimeError(f"{type(self).__name__} is not being trained")
        return self.trainer_state.run

    @property
    def device(self) -> torch.device:
        """The device that parameters, buffers and batches are on."""
        return self.trainer_state.device

    @property
    def global_rank(self) -> int:
        """This process among all; 0 outside a run."""
        run = self.trainer_state.run
        return 0 if run is None else run.global_rank

    @property
    def global_step(self) -> int:
        """Optimizer steps made so far; 0 outside a run."""
        run = self.trainer_state.run
        return 0 if run is None else run.global_step

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0; 0 outside a run."""
        run = self.trainer_state.run
        return 0 if run is None else run.current_epoch
