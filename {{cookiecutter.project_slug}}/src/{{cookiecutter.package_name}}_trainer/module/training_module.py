"""The user's module with its steps."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, foreign, shown
from ..launch import collectives
from ..logging.metrics import ReduceFx
from .current_run import Manual, Run, RunFacts, RunProperties, TrainerState
from .hooks import Hooks

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_REST = inspect.Parameter.VAR_POSITIONAL


class _State:
    """Sets an attribute of a module and of the training modules in it; they are read as others."""

    def __set__(self, module: nn.Module, state: TrainerState) -> None:
        for submodule in module.modules():
            if isinstance(submodule, TrainingModule):
                vars(submodule)["trainer_state"] = state


class TrainingModule(RunProperties, Hooks, nn.Module):
    """A model and its training, independent of devices, processes and precision.

    Override :meth:`training_step` and :meth:`configure_optimizers`, and other hooks as needed. The
    batch of a step is on the module's device, and so are registered buffers. Create new tensors
    from existing ones (``x.new_zeros``) or on ``self.device``.

    The trainer sets the attribute ``trainer_state`` (:class:`TrainerState`) on the module, and on
    each training module inside it. During a run, the module also has hooks, and a replaced
    ``forward`` in parts that are compiled or checkpointed.
    After a run, only the fully sharded strategies leave a module sharded.
    """

    automatic_optimization: bool = True
    """False: manual optimization, in which ``training_step`` calls backward and the optimizers."""

    may_skip_batches: bool = False
    """True: ``training_step`` may return ``None``, and all ranks then skip the batch. They agree on
    it with one more all-reduce per batch, and average gradients in each, also in accumulation."""

    example_input_array: Tensor | tuple[Tensor, ...] | dict[str, Tensor] | None = None
    """Inputs of ``forward`` for the command ``export``: one, several, or by name, batch first."""

    flops_per_sample: float | None = None
    """Floating-point operations of forward and backward of one sample, for ``peak_flops``."""

    logger: Any
    """In a run, that of ``trainer``, unless the module sets the attribute."""

    trainer_state: TrainerState = _State()  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.trainer_state = TrainerState()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            if (step := getattr(cls, name)) is None:  # without the step of a base class
                setattr(cls, name, getattr(TrainingModule, name))
                continue
            parameters = inspect.signature(step).parameters
            kinds = [parameter.kind for parameter in parameters.values()]
            if "dataloader_idx" in parameters:
                setattr(cls, name, _with_loader(step))
            elif sum(kind in _POSITIONAL for kind in kinds) == 2 and _REST not in kinds:
                setattr(cls, name, _with_index(step))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(TrainingModule, name, None), property):
            line = f"{type(self).__name__}.{name} is set by the trainer: use another name"
            raise AttributeError(line)
        super().__setattr__(name, value)

    # --- steps -----------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Compute the loss of a batch: a scalar (mean over samples), or a dict with key ``loss``.

        Hooks get the whole dict as ``outputs`` of ``on_train_batch_end``. With dp and ddp2, it may
        return any value from which ``training_step_end`` computes the loss; with manual
        optimization, nothing. With :attr:`may_skip_batches`, ``None`` skips the batch on all ranks:
        it counts as zero in its step, which is left out if all its batches are.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def training_step_end(self, outputs: Any) -> Any:
        """Process the output of :meth:`training_step`; with dp and ddp2, of all device replicas."""
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Validate on a batch; log the metrics.

        With several loaders, ``self.dataloader_name`` is the name of the batch's.
        """
        raise NotImplementedError(f"{type(self).__name__} has no validation_step")

    def validation_step_end(self, outputs: Any) -> Any:
        """Like :meth:`training_step_end`, for validation."""
        return outputs

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Test on a batch; log the metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step")

    def test_step_end(self, outputs: Any) -> Any:
        """Like :meth:`training_step_end`, for test."""
        return outputs

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Predict a batch; by default, return the output of ``forward``."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Create the optimizers, and optionally learning-rate schedulers.

        Returns:
            An optimizer; a list of optimizers, which all step at each step; two lists, optimizers
            and schedulers; or a dict, or list of dicts, with ``optimizer`` and ``lr_scheduler``. A
            scheduler steps at the end of each epoch; ``{"scheduler": s, "interval": "step"}`` steps
            it after each optimizer step, and ``"monitor": name`` passes it a logged value.
            ``self.trainer.total_steps`` is the number of optimizer steps of the run.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers")

    def initialize(self, name: str, layer: nn.Module) -> None:
        """Initialize the parameters of a layer that was built on the meta device.

        Called for each layer that has its own parameters, which are on the CPU and uninitialized;
        also for the module itself, whose name is ``""``. By default, calls the layer's
        ``reset_parameters``, which it must have.
        """
        reset: Callable[[], object] | None = getattr(layer, "reset_parameters", None)
        if reset is None:
            kind = type(layer).__name__
            raise UserError(
                f"meta_device: {type(self).__name__} does not initialize {name or 'itself'} "
                f"({kind}); override initialize, or give {kind} a reset_parameters"
            )
        reset()

    def count_samples(self, batch: Any) -> int:
        """Count the samples of a batch on the CPU, where the batch does not say it itself.

        By default, what its object knows (``num_graphs``), the loader's ``batch_size``, the first
        dimension of all its tensors, or of its labels.
        """
        raise NotImplementedError(f"{type(self).__name__} has no count_samples")

    def count_weight(self, batch: Any) -> float:
        """Count what the loss of a batch is a mean over, if that is not samples; on the CPU.

        For example the tokens that are not ignored: ``(batch["labels"] != -100).sum()``. A step is
        then the mean over all of them in its micro-batches and ranks, and so are logged values.
        """
        raise NotImplementedError(f"{type(self).__name__} has no count_weight")

    def count_tokens(self, batch: Any) -> int:
        """Count the tokens of a training batch, to log ``speed/tokens_per_second``.

        Called before the step of each batch, if it is overridden. Read shapes only: to read values,
        the host would wait for the device.
        """
        raise NotImplementedError(f"{type(self).__name__} has no count_tokens")

    def rank_state(self) -> dict[str, Any]:
        """Get what this rank keeps in attributes, to save it: tensors, numbers, text, containers.

        For example the hidden state of a recurrent network that continues in the next batch.
        Parameters, buffers and torchmetrics metrics are saved without it.
        """
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Load this rank's :meth:`rank_state`, with tensors on the CPU.

        Called when a run resumes on as many ranks as saved it; a line says so on others.
        """

    # --- manual optimization -----------------------------------------------------------------

    def optimizers(self) -> Any:
        """Get the optimizer of ``configure_optimizers``, or the list of them.

        With manual optimization, each is a :class:`~.manual_optimization.ManualOptimizer`, which
        has ``step()``, ``zero_grad()``, ``clip_gradients(value)``, and ``toggle_model(
        sync_grad=True)``: a context in which only its own parameters require gradients. With
        automatic optimization, the trainer steps them: use them to read and change their options.
        """
        is_manual = not self.automatic_optimization
        optimizers = self._manual().optimizers if is_manual else self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else [*optimizers]

    def manual_backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Compute the gradients of a loss, and average them unless ``sync_grad=False``.

        ``retain_graph``: as in ``Tensor.backward``, for another loss of the same forward.
        """
        self._manual().backward(loss, retain_graph)

    def lr_schedulers(self) -> Any:
        """Get the schedulers of ``configure_optimizers``; step them in manual optimization."""
        schedulers = self.trainer.schedulers
        return schedulers[0] if len(schedulers) == 1 else [*schedulers]

    def _manual(self) -> Manual:
        if self.trainer.manual is None:
            when = "only in training_step, with automatic_optimization = False"
            raise RuntimeError(f"optimizers of {type(self).__name__} are available {when}")
        return self.trainer.manual

    # --- logging and state of the run -------------------------------------------------------

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
        **other: bool,
    ) -> None:
        """Log a number, a scalar tensor, or a torchmetrics metric.

        Args:
            name: Name in the logs and the progress bar.
            value: The value; tensors stay on their device, and are read only when they are shown.
            on_step: Log the value of each step; in training only, and there by default. With
                gradient accumulation, it is reduced over the step's micro-batches.
            on_epoch: Log the reduction over the epoch; default in validation and test. In training,
                the steps' values are reduced too, as ``NAME_epoch``, unless it is False.
            prog_bar: Show it in the progress bar.
            sync_dist: Reduce over all ranks, each sample counted once, so that every rank has the
                same value; every rank must then log it. False: keep each rank's own value.
            reduce_fx: ``"mean"`` (weighted as the loss), ``"sum"``, ``"min"`` or ``"max"``.
            batch_size: Number of samples of the value; default: that of the batch, or its
                :meth:`count_weight`.

        A metric is computed and reset at the end of the epoch; it synchronizes itself.
        Outside of a run (if you call a step yourself), nothing is logged.
        """
        if other and (foreign.load() or True) and (unknown := foreign.keywords("log", (), other)):
            raise TypeError(f"log() got an unexpected keyword argument {min(unknown)!r}")
        run, samples = self.trainer_state.run, self.trainer_state.samples
        if run is not None:
            if not isinstance(name, str) or (batch_size is not None and not batch_size >= 0):
                given = f"log({shown(name)}, batch_size={batch_size!r})"
                raise UserError(f"{given}: give a text as the name, and a batch_size from 0 on")
            samples = samples if batch_size is None else batch_size
            run.log(name, value, on_step, on_epoch, prog_bar, sync_dist, reduce_fx, samples)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Call :meth:`log` for each entry, with the same options."""
        for name, value in values.items():
            self.log(name, value, **options)

    @property
    def trainer(self) -> Run:
        """The run that trains this module.

        Raises:
            RuntimeError: There is none.
        """
        if self.trainer_state.run is None:
            raise RuntimeError(f"{type(self).__name__} is not being trained")
        return self.trainer_state.run

    @property
    def device(self) -> torch.device:
        """The device of parameters, buffers and batches."""
        return self.trainer_state.device

    @property
    def dataloader_name(self) -> str:
        """Name of the batch's loader in an evaluation; ``""`` if loaders are not in a dict."""
        run = self.trainer_state.run
        return "" if run is None else run.dataloader_name

    def _run_facts(self) -> RunFacts:
        run = self.trainer_state.run
        return RunFacts() if run is None else run._run_facts()

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """Stack the tensor of every rank, in rank order, on every rank; all ranks must call it.

        With ``sync_grads``, the gradient of a rank's tensor is the sum of those on all ranks.
        Under a pipeline, not all ranks run a step: call it in a hook.

        Returns:
            A tensor with a new first dimension of ``world_size``.

        Raises:
            UserError: Shapes differ between ranks; on every rank. Or some replicas have no such
                batch of an evaluation.
        """
        run = self.trainer_state.run
        if run is not None and not run.recorder.context.is_even:
            raise UserError(
                "all_gather: some ranks have no such batch of this evaluation, and would not join: "
                "set uneven_inputs='join', or gather in the hook at the end of the evaluation"
            )
        shapes = collectives.gather(list(tensor.shape))
        if any(shape != shapes[0] for shape in shapes):
            known = ", ".join(f"{rank}: {tuple(shape)}" for rank, shape in enumerate(shapes))
            advice = "pad the tensors, or gather their sum or mean"
            raise UserError(f"all_gather: shapes differ between ranks ({known}): {advice}")
        return collectives.stacked(tensor if sync_grads else tensor.detach())

    def print(self, *values: Any, **options: Any) -> None:
        """Like ``print``, on global rank 0 only."""
        if self.is_global_zero:
            print(*values, **options)


def _with_index(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that takes a batch only, as one that the trainer can call like any other."""
    return functools.wraps(step)(lambda self, batch, batch_idx=None: step(self, batch))


def _with_loader(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that takes the index of its loader in a list: it is given where the call does not."""

    @functools.wraps(step)
    def call(self: TrainingModule, batch: Any, batch_idx: int, *args: int, **named: int) -> Any:
        index = () if args or named else (int(self.dataloader_name.rpartition("_")[2] or 0),)
        return step(self, batch, batch_idx, *args, *index, **named)

    return call
