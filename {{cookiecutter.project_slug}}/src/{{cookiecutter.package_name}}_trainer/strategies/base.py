"""The contract of all strategies; its defaults are right for one process on one device.

A strategy defines how parameters, gradients and data are handled, and nothing else: a launcher
starts the processes, and the cluster gives this process its rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import fill_module
from ..data import moving
from ..errors import UserError
from ..launch import collectives
from ..launch.cluster import Layout
from ..module import TrainingModule
from ..options import Options
from .clipping import clip_gradients
from .limits import Limits
from .optimizer_state import add_groups, load_optimizer_state, optimizer_state, parameter_names
from .optimizers import Optimization
from .precision import Precision
from .weights import LocalWeights

if TYPE_CHECKING:
    from .engine_optimizers import Noise
    from .memory import Memory, Sizes

Devices = Sequence[torch.device]
Stage = Literal["training", "validation", "test", "predict"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_BESIDE_LOSS = {
    "weight": "used: override count_weight(batch) in the module, which weighs losses and logged "
    "means",
    "log": "logged: use self.log",
    "progress_bar": "logged: use self.log",
}


@dataclass(frozen=True, kw_only=True)
class DataLayout:
    """Which part of each global batch a process reads."""

    replicas: int = 1  # data-parallel ones
    index: int = 0  # of this process' replica
    is_first: bool = True  # no lower rank belongs to the same replica
    random_rank: int  # the lowest that draws the same random numbers, such as dropout masks
    counts: bool = True  # this process logs and predicts: the last stage of a pipeline
    devices: Devices  # of this process, to which batches are copied ahead; several share a batch


class StepOutput(NamedTuple):
    """A micro-batch's losses, before they are weighted, and what the user's steps returned.

    Several if the strategy divides it; none on the first processes of a pipeline.
    """

    losses: list[Tensor]
    outputs: list[Any]


class BatchSkipped(Exception):
    """Every rank skips a batch, because ``training_step`` returned ``None`` on at least one."""


class RankLocal(NamedTuple):
    """State of this rank alone, such as of a gradient compression; one to load may be another's."""

    state: Callable[[], dict[str, Tensor]]
    load: Callable[[Mapping[str, Tensor]], None]


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
    :meth:`teardown`. Subclasses override and use what is public.
    """

    limits: Limits = Limits(one_process_per_node=True)
    around_hooks: Callable[[str], AbstractContextManager[None]] | None = None
    """Context of a hook of this name, if hooks may not find weights or gradients in parameters."""

    device: torch.device
    precision: Precision
    module: TrainingModule
    steps: dict[Stage, Callable[[Stage, Any, int], Any]]
    """What runs the user's step of a stage: such as an engine's wrapper, in training."""
    rank_local = RankLocal(dict, lambda _: None)
    _devices: Devices
    _noise: "Noise | None" = None

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

    def connect(self, layout: Layout, devices: Devices, precision: Precision) -> None:
        """Connect to the peers: initialize the process group.

        ``devices``: of this process; several if it drives all devices of its node.
        """
        self._devices, self.device, self.precision = devices, devices[0], precision
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)

    @property
    def data(self) -> DataLayout:
        """Which part of each global batch this process reads."""
        return DataLayout(random_rank=collectives.rank(), devices=self._devices)

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
        self.precision.cast((*module.parameters(), *module.buffers()))
        self.module = module.to(self.device)
        module.trainer_state = replace(module.trainer_state, device=self.device)
        self.steps = dict.fromkeys(STAGES, StepModule(module).forward)

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
            BatchSkipped: On every rank, if a step returned ``None``: no rank has its gradients.
            UserError: The loss has no gradient, or is not a scalar.
        """
        outputs = self.forward("training", batch, batch_idx)
        if self.module.may_skip_batches:
            # On the CPU, so that the host does not wait for the device.
            asks = torch.tensor([outputs is None], dtype=torch.int32)
            if self.agree(asks).item() > 0:
                raise BatchSkipped
        loss = self.read_loss(outputs)
        check_loss(loss, "training_step")
        self.backward(loss if weight == 1.0 else loss * weight, synchronize=synchronize)
        return StepOutput([loss], [outputs])

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run a step of a stage, and its ``*_step_end`` hook."""
        dtype = self.precision.parameter_dtype
        # Several devices share a batch, which the step divides.
        if len(self._devices) == 1 and (self.device.type != "cpu" or dtype is not None):
            batch = moving.move(batch, self.device, dtype)
        is_whole = stage == "predict"  # no hook ends it
        end = (lambda made: made) if is_whole else getattr(self.module, f"{stage}_step_end")
        if self.precision.dtype is None:
            return end(self.steps[stage](stage, batch, batch_idx))
        with self.precision.autocast():
            return end(self.steps[stage](stage, batch, batch_idx))

    def read_loss(self, outputs: Any) -> Tensor:
        """The loss in what ``training_step``, or ``training_step_end``, returned."""
        return read_loss(outputs)

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        """Compute the gradients of a loss, and accumulate them."""
        scaled = loss if self.precision.scaler is None else self.precision.scale(loss)
        scaled.backward(retain_graph=retain_graph)

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

        Manual optimization steps one by one with ``ends=False``, then ends the step without any.
        """
        for optimizer in optimization.optimizers:
            self.step_optimizer(optimizer)
        if ends:
            if self.precision.scaler is not None:
                self.precision.update()
            for optimizer in optimization.optimizers:
                optimizer.zero_grad()

    def step_optimizer(self, optimizer: Optimizer) -> None:
        """Step one of the optimizers, unless the gradient scaler skips it.

        One that is not torch's may draw random numbers: replicas draw the same.
        """
        has_scaler = self.precision.scaler is not None
        step = partial(self.precision.step, optimizer) if has_scaler else optimizer.step
        if type(optimizer).step.__module__.startswith("torch."):
            step()
            return
        from .engine_optimizers import Noise

        self._noise = self._noise or Noise(self.module, self._devices)
        with self._noise.alike(optimizer):
            step()

    # --- all processes -------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, how: collectives.How) -> Tensor:
        """Reduce a value over all data-parallel replicas, for logging."""
        return collectives.all_reduce(tensor, how)

    def agree(self, request: Tensor) -> Tensor:
        """The maximum over ranks of what they ask for: to skip a batch; to stop after a step."""
        return collectives.all_reduce(request, "max")

    # --- checkpoints ---------------------------------------------------------------------------

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        """State of model and optimizers by parameter name: the same form with every strategy."""
        model = dict(self.module.state_dict())
        names = parameter_names(self.module)  # after it: an engine may have gathered them
        optimizers = optimization.optimizers if optimization else []
        return {"model": model, "optimizers": [optimizer_state(opt, names) for opt in optimizers]}

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        """Load a state of :meth:`state` of any strategy, after :meth:`setup`.

        Its tensors may be ``Stored``, not read yet. Without optimizers, only the model is loaded.
        """
        fill_module(self.module, state["model"])
        if optimization is not None:
            names = parameter_names(self.module)
            for optimizer, saved in zip(optimization.optimizers, state["optimizers"], strict=True):
                add_groups(optimizer, saved["param_groups"], self.module)
                load_optimizer_state(optimizer, saved, names)

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
        advice = "or, to skip the batch on all ranks, set may_skip_batches = True in the module"
        raise UserError(f"training_step returned None: return the loss; {advice}")
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        problem = "training_step must return a scalar loss, or a dict with 'loss'"
        raise UserError(f"{problem}; it gave {what}")
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
