"""The contract of all strategies; its defaults are right for one process on one device.

A strategy defines how parameters, gradients and data are handled, and nothing else: a launcher
starts the processes, and the cluster gives this process its rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import fill_module
from ..data import moving
from ..errors import UserError
from ..launch import collectives
from ..launch.cluster import Layout
from ..launch.collectives import How
from ..module import TrainingModule
from ..options import Options
from .clipping import clip_gradients
from .limits import Limits
from .optimizer_state import load_optimizer_state, optimizer_state, parameter_names
from .optimizers import Optimization
from .precision import Precision
from .weights import LocalWeights

if TYPE_CHECKING:
    from .engine_optimizers import Noise
    from .memory import Memory, Sizes

Launcher = Literal["subprocess", "spawn", "fork"]
Stage = Literal["training", "validation", "test", "predict"]
_BESIDE_LOSS = {
    "weight": "used: override count_weight(batch) in the module, which weighs losses and logged "
    "means",
    "log": "logged: use self.log",
    "progress_bar": "logged: use self.log",
}


@dataclass(frozen=True)
class DataLayout:
    """Which part of each global batch a process reads.

    Args:
        replicas: Number of data-parallel replicas.
        index: Index of this process' replica.
        is_first: Whether no lower rank belongs to the same replica.
        random_rank: The lowest rank that draws the same random numbers, such as dropout masks.
        counts: Whether this process logs and predicts: the last stage of a pipeline.
        devices: Devices of this process to which batches are copied ahead; several share a batch.
    """

    replicas: int
    index: int
    is_first: bool
    random_rank: int
    counts: bool
    devices: Sequence[torch.device]


class StepOutput(NamedTuple):
    """A micro-batch's losses, before they are weighted, and what the user's steps returned.

    Several if the strategy divides it; none on the first processes of a pipeline.
    """

    losses: list[Tensor]
    outputs: list[Any]


class BatchSkipped(Exception):
    """Every rank skips a batch, because ``training_step`` returned ``None`` on at least one."""


class StepModule(nn.Module):
    """A module whose ``forward`` is the user's step, for engines that wrap a ``forward``."""

    def __init__(self, module: TrainingModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run ``training_step``, ``validation_step``, … on a batch."""
        return getattr(self.module, f"{stage}_step")(batch, batch_idx)


class Strategy:
    """How parameters, gradients and data are handled. Subclasses override what differs.

    The trainer calls :meth:`connect` and :meth:`setup`; for each micro-batch
    :meth:`forward_backward`; for each step :meth:`clip` and :meth:`step`; at the end
    :meth:`teardown`.
    """

    limits: Limits = Limits(one_process_per_node=True)
    launcher: Launcher = "subprocess"
    """How several processes are started, if nothing has started them."""
    compile_seconds = 0.0
    """How long peers wait for a rank that compiles, beside the timeout of collectives."""
    around_hooks: Callable[[str], AbstractContextManager[None]] | None = None
    """Context in which a hook of this name is called, if hooks may not find all weights and
    gradients in the parameters."""

    device: torch.device
    precision: Precision
    module: TrainingModule
    _layout: Layout
    _devices: Sequence[torch.device]
    _step_module: StepModule
    """Runs the user's steps."""
    _noise: "Noise | None" = None
    _wrapped: Any = None
    """The engine's wrapper of it, which runs training steps; without it, this process does."""

    # --- before any process is started ------------------------------------------------------------

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        """One line for each of the trainer's options that contradicts the strategy's.

        Without a module, when a trainer is created. With one: one line for each of its properties
        that the strategy does not support; the options have no problems then.
        """
        return []

    def replicas(self, devices: int, nodes: int) -> int:
        """Number of data-parallel replicas for a number of devices per node.

        Raises:
            ConfigurationError: The number of processes does not fit the strategy's options.
        """
        return self.limits.local_processes(devices) * nodes

    def memory(self, sizes: "Sizes") -> "Memory":
        """The memory of the rank that needs the most, before any process is started.

        ``sizes``: what a training step needs in one process; gradients are freed after each.
        """
        from .memory import memory

        return memory(sizes)

    # --- before the first step -----------------------------------------------------------------

    def connect(
        self, layout: Layout, devices: Sequence[torch.device], precision: Precision
    ) -> None:
        """Connect to the peers: initialize the process group.

        ``devices``: of this process; several if it drives all devices of its node.
        """
        self._layout, self._devices, self.precision = layout, devices, precision
        self.device = devices[0]
        self._moves = self.device.type != "cpu" or precision.parameter_dtype is not None
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)

    @property
    def data(self) -> DataLayout:
        """Which part of each global batch this process reads."""
        rank, own = self._layout.rank, self._devices
        return DataLayout(
            replicas=1, index=0, is_first=True, random_rank=rank, counts=True, devices=own
        )

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        """Move, wrap and shard a module, and create its optimizers.

        ``configure`` creates the optimizers. It is called before or after the module is wrapped, as
        the engine requires, and its optimizers may be replaced by those that are returned.
        """
        self.place(module)
        return configure()

    def place(self, module: TrainingModule) -> None:
        """Move parameters and buffers to the device; used instead of ``setup`` without training."""
        if any(parameter.is_meta for parameter in module.parameters()):
            from ..memory import meta_device

            meta_device.Initializer(module).materialize(module)
        self.precision.cast(module)
        self.module = module.to(self.device)
        module.trainer_state = replace(module.trainer_state, device=self.device)
        self._step_module = self._make_step_module(module)

    def _make_step_module(self, module: TrainingModule) -> StepModule:
        return StepModule(module)

    # --- a micro-batch -------------------------------------------------------------------------

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        """Run the user's ``training_step`` on a micro-batch, then backward.

        Args:
            batch, batch_idx: From the loader, and its index in the epoch.
            weight: Factor of the loss, so that the average over replicas, summed over a step's
                micro-batches, is the mean over the global batch.
            synchronize: False while gradients are accumulated and need not be averaged yet.

        Raises:
            BatchSkipped: On every rank, if the step returned ``None`` on one: no rank has gradients
                of the batch.
            UserError: The loss has no gradient, or is not a scalar.
        """
        outputs = self.forward("training", batch, batch_idx)
        if self.module.may_skip_batches and self._skips(outputs is None):
            raise BatchSkipped
        loss = self._read_loss(outputs)
        check_loss(loss, "training_step")
        self.backward(loss if weight == 1.0 else loss * weight, synchronize=synchronize)
        return StepOutput([loss], [outputs])

    def _skips(self, asks: bool) -> bool:
        """Whether all ranks skip a batch, since one asks for it."""
        if self._layout.world_size == 1:
            return asks
        # On the CPU, so that the host does not wait for the device.
        return collectives.all_reduce(torch.tensor([asks], dtype=torch.int32), "max").item() > 0

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run a step of a stage, and its ``*_step_end`` hook."""
        if self._moves:
            batch = moving.move(batch, self.device, self.precision.parameter_dtype)
        if self.precision.dtype is None:
            return self._call_steps(stage, batch, batch_idx)
        with self.precision.autocast():
            return self._call_steps(stage, batch, batch_idx)

    def _call_steps(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = self._call_step(stage, batch, batch_idx)
        return outputs if stage == "predict" else getattr(self.module, f"{stage}_step_end")(outputs)

    def _call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if stage == "training" and self._wrapped is not None:
            return self._wrapped(stage, batch, batch_idx)
        return self._step_module.forward(stage, batch, batch_idx)  # no engine's hooks are to call

    def _read_loss(self, outputs: Any) -> Tensor:
        return read_loss(outputs)

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        """Compute the gradients of a loss, and accumulate them."""
        scaled = loss if self.precision.scaler is None else self.precision.scale(loss)
        scaled.backward()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of an evaluation, in which buffers are the same on all ranks.

        Training continues afterwards as before it, also if it fails.
        """
        yield

    # --- a step --------------------------------------------------------------------------------

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        """Clip the gradients of the whole model, by global ``"norm"`` or by ``"value"``.

        With an infinite ``value``, the norm is only computed.

        Returns:
            The norm before clipping, on the device, to be logged; ``None`` if it is not computed.
        """
        self.precision.unscale(optimization.optimizers)
        return clip_gradients(optimization.parameters, value, algorithm)

    def step(self, optimization: Optimization, *, ends: bool = True) -> None:
        """Step the optimizers, update the gradient scale, and reset the gradients.

        A step whose gradients are not finite is skipped, which ``precision`` notes.

        Manual optimization steps its optimizers one by one, with ``ends=False``; then it ends the
        step without any.
        """
        for optimizer in optimization.optimizers:
            self._step_optimizer(optimizer)
        if ends:
            if self.precision.scaler is not None:
                self.precision.update()
            for optimizer in optimization.optimizers:
                optimizer.zero_grad()

    def _step_optimizer(self, optimizer: Optimizer) -> None:
        has_scaler = self.precision.scaler is not None
        step = partial(self.precision.step, optimizer) if has_scaler else optimizer.step
        if type(optimizer).step.__module__.startswith("torch."):
            step()
        else:
            with self._drawing(optimizer):
                step()

    def _drawing(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Context of a step that may draw random numbers: replicas draw the same."""
        from .engine_optimizers import Noise

        self._noise = self._noise or Noise(self.module, self._devices)
        return self._noise.alike(optimizer)

    # --- all processes -------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        """Reduce a value over all data-parallel replicas, for logging."""
        return collectives.all_reduce(tensor, how)

    def agree(self, request: Tensor) -> Tensor:
        """The maximum over ranks of what they ask for after a step, see ``launch/signals.py``."""
        return collectives.all_reduce(request, "max")

    # --- checkpoints ---------------------------------------------------------------------------

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        """State of model and optimizers by parameter name: the same form with every strategy."""
        optimizers = optimization.optimizers if optimization else []
        return {
            "model": self._model_state(),
            "optimizers": [self._optimizer_state(optimizer) for optimizer in optimizers],
        }

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        """Load a state of :meth:`state` of any strategy, after :meth:`setup`.

        Its tensors may be ``Stored``, not read yet. Without optimizers, only the model is loaded.
        """
        self._load_model(state["model"])
        if optimization is not None:
            for optimizer, saved in zip(optimization.optimizers, state["optimizers"], strict=True):
                self._load_optimizer(optimizer, saved)

    def _model_state(self) -> dict[str, Any]:
        return dict(self.module.state_dict())

    def _load_model(self, saved: Mapping[str, Any]) -> None:
        fill_module(self.module, saved)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_state(optimizer, parameter_names(self.module))

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        load_optimizer_state(optimizer, saved, parameter_names(self.module))

    def rank_local_state(self) -> dict[str, Tensor]:
        """Rank-local state, for example of a gradient compression."""
        return {}

    def load_rank_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's :meth:`rank_local_state`."""

    def weights(self) -> LocalWeights:
        """The parameters in this process, to average them; called after :meth:`setup`."""
        return LocalWeights(self.module.named_parameters(remove_duplicate=False))

    def teardown(self) -> None:
        """Undo :meth:`connect`."""


class SingleDevice(Strategy):
    """One process on one device."""

    limits: Limits = Limits(max_devices=1, max_nodes=1)


def read_loss(outputs: Any) -> Tensor:
    """Get the loss from the output of a training step; refuse values to log beside it."""
    if isinstance(outputs, Tensor) and outputs.numel() == 1:
        return outputs
    if outputs is None:
        raise UserError(
            "training_step returned None: return the loss; or, to skip the batch on all ranks, set "
            "may_skip_batches = True in the module"
        )
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise UserError(
            f"training_step must return a scalar loss, or a dict with 'loss'; it gave {found}"
        )
    refuse_others(outputs)
    return loss


def refuse_others(outputs: Any) -> None:
    """Raise UserError for what a training step returned beside its loss, as others use it."""
    for key, instead in _BESIDE_LOSS.items() if isinstance(outputs, Mapping) else ():
        if key in outputs:
            raise UserError(f"training_step returned {key!r} beside 'loss', which is not {instead}")


def check_loss(loss: Tensor, source: str) -> None:
    """Raise UserError if backward cannot be called on a loss."""
    if loss.numel() != 1:
        what = f"gave a loss of shape {tuple(loss.shape)}: give a scalar, such as its mean()"
    elif not loss.is_floating_point():
        what = (
            f"gave a loss of type {loss.dtype}: give a floating-point one, computed from the "
            "module's parameters"
        )
    elif not loss.requires_grad:
        what = (
            "gave a loss without a gradient: compute it from the module's parameters, without "
            "detach(), item() or torch.no_grad()"
        )
    else:
        return
    raise UserError(f"{source} {what}")
