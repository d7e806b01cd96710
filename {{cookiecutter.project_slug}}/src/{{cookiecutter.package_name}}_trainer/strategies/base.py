"""The contract of all strategies; its defaults are right for one process on one device.

A strategy defines how parameters, gradients and data are handled, and nothing else: a launcher
starts the processes, and the cluster gives this process its rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import stored_tensors
from ..data import Feed, MicroBatch, moving, transfer
from ..launch import collectives
from ..launch.cluster import Layout
from ..launch.collectives import How
from ..launch.hangs import timer
from ..memory import meta_device
from ..module import TrainingModule
from ..options import Options
from .clipping import clip_gradients
from .limits import Limits
from .optimizer_state import load_optimizer_state, optimizer_state, parameter_names
from .optimizers import Optimization
from .precision import Precision
from .step import BatchSkipped, Stage, check_loss, read_loss
from .weights import LocalWeights

Launcher = Literal["subprocess", "spawn", "fork"]


class Strategy:
    """How parameters, gradients and data are handled. Subclasses override what differs.

    The trainer calls :meth:`connect`, then :meth:`setup`; for each micro-batch
    :meth:`forward_backward`; for each step :meth:`clip_gradients`, :meth:`optimizer_step` for each
    optimizer, :meth:`end_step` and :meth:`zero_grad`; and at the end :meth:`end_fit` and
    :meth:`teardown`.
    """

    limits: Limits = Limits()
    launcher: Launcher = "subprocess"
    """How several processes are started, if nothing has started them."""
    timeout_seconds: float = 600.0
    """Timeout of collectives: if a process does not join, they fail on its peers."""

    preset: Mapping[str, Any] = MappingProxyType({})
    """Options that are set by the name of the strategy."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Options that it does not have (of other strategies, older names), with an alternative."""

    lost_peer_errors: ClassVar[Sequence[str]] = ()
    """Names of an engine's exceptions that only report the loss of a peer."""

    shards_parameters: bool = False
    """Whether parameters are sharded over processes. Then all processes take part in every forward,
    and after a fit the weights are in its checkpoints."""

    steps_together: bool = True
    """Whether all ranks take each step together. If not, nothing waits for other ranks between the
    ends of epochs, validations and checkpoints: :meth:`agreed_signal` is called instead of an
    all-reduce, and the logged values of a step are those of the main rank."""

    compiles_steps: ClassVar[bool] = False
    """Whether all operations of a step are compiled together, so that they must be the same ones in
    each step."""

    note_loss: Callable[[Tensor], None] | None = None
    """Receives each loss before its backward; stops a fit whose losses are not finite."""

    note_outputs: Callable[[Any], None] | None = None
    """Receives what each ``training_step`` and its ``training_step_end`` returned."""

    read_sample: Callable[[], Any] | None = None
    """Reads a training batch on the CPU, before :meth:`setup`; all processes must call it."""

    layout: Layout
    device: torch.device
    devices: Sequence[torch.device]
    precision: Precision
    module: TrainingModule

    # --- before any process is started ------------------------------------------------------------

    @classmethod
    def make(cls, **options: Any) -> "Strategy":
        """Create the strategy; a class may leave some options to another class of its folder."""
        return cls(**options)

    def problems(self, options: Options) -> list[str]:
        """One line for each of the trainer's options that contradicts the strategy's."""
        return []

    @property
    def needs_optimizers(self) -> bool:
        """Whether the module must have a ``configure_optimizers``."""
        return True

    def problems_of(self, module: TrainingModule) -> list[str]:
        """One line for each property of a module that the strategy does not support."""
        return []

    # --- before the first step -----------------------------------------------------------------

    def connect(
        self, layout: Layout, own_devices: Sequence[torch.device], precision: Precision
    ) -> None:
        """Connect to the peers: initialize the process group.

        Args:
            layout: Layout of the processes.
            own_devices: Devices of this process; several if it drives all devices of its node.
            precision: Precision of the run.
        """
        self.layout, self.devices, self.precision = layout, own_devices, precision
        self.device = own_devices[0]
        self._moves = self.device.type != "cpu" or precision.parameter_dtype is not None
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        """Move, wrap and shard a module, and create its optimizers.

        Args:
            module: The user's module, on the CPU.
            configure: Creates the optimizers. Called before or after the module is wrapped, as the
                engine requires; its optimizers may be replaced.

        Returns:
            The optimizers to step.
        """
        self.place(module)
        return configure()

    def place(self, module: TrainingModule) -> None:
        """Move parameters and buffers to the device; used instead of ``setup`` without training."""
        meta_device.materialize(module, module)
        self.precision.cast(module)
        self.module = module.to(self.device)
        module.trainer_state = replace(module.trainer_state, device=self.device)

    @property
    def is_expendable(self) -> bool:
        """Whether the other ranks continue if this one is killed; read after :meth:`connect`."""
        return False

    @staticmethod
    def local_processes(devices: int) -> int:
        """Number of processes per node for a number of devices per node."""
        return 1

    def check_processes(self, processes: int) -> None:
        """Check the number of processes of the run, before any of them is started.

        Raises:
            ConfigurationError: It does not fit the strategy's options.
        """

    def replicas(self, devices: int, num_nodes: int) -> int:
        """Number of data-parallel replicas for a number of devices per node."""
        return 1

    @property
    def data_replicas(self) -> int:
        """Number of data-parallel replicas."""
        return 1

    @property
    def data_index(self) -> int:
        """Index of this process' data-parallel replica."""
        return 0

    @property
    def is_first_of_replica(self) -> bool:
        """Whether no lower rank belongs to the same data-parallel replica."""
        return True

    @property
    def random_rank(self) -> int:
        """The lowest rank that draws the same random numbers as this one, such as dropout masks."""
        return self.layout.rank

    # --- a micro-batch -------------------------------------------------------------------------

    def batches(self, feed: Feed, epoch: int, start: int) -> Iterator[MicroBatch]:
        """Iterate over the batches of an epoch, from ``start`` on, where ``forward`` needs them."""
        dtype = self.precision.parameter_dtype
        try:
            for batch in transfer.read(feed, epoch, start, [self.device], dtype):
                yield batch
                timer.note_batch()
        finally:
            timer.pause()

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> None:
        """Run the user's ``training_step`` on a micro-batch, then backward.

        Args:
            batch: The batch from the loader.
            batch_idx: Index of the micro-batch in its epoch.
            weight: Factor of the loss, so that the average over replicas, summed over a step's
                micro-batches, is the mean over the global batch.
            synchronize: False while gradients are accumulated and need not be averaged yet.

        Raises:
            BatchSkipped: On every rank, if the step returned ``None`` on one: no rank has gradients
                of the batch.
        """
        outputs = self.forward("training", batch, batch_idx)
        if self.module.may_skip_batches and self.agree_to_skip(outputs is None):
            raise BatchSkipped
        loss = self.read_loss(outputs)
        self.take_loss(loss, "training_step")
        self.backward(loss if weight == 1.0 else loss * weight, synchronize=synchronize)

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run a step of a stage, and its ``*_step_end`` hook."""
        batch = self.move(batch)
        with nullcontext() if self.precision.dtype is None else self.precision.autocast():
            outputs = self._step(stage, batch, batch_idx)
        if stage == "training" and self.note_outputs is not None:
            self.note_outputs(outputs)
        return outputs

    def _step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = self.call_step(stage, batch, batch_idx)
        if stage == "predict":
            return outputs
        return getattr(self.module, f"{stage}_step_end")(outputs)

    def agree_to_skip(self, asks: bool) -> bool:
        """Whether all ranks skip a batch, since one asks for it; all ranks must call it."""
        return asks

    def read_loss(self, outputs: Any) -> Tensor:
        """Get the loss from the output of a training step and its ``training_step_end``."""
        return read_loss(outputs)

    def take_loss(self, loss: Tensor, source: str) -> None:
        """Check a loss before its backward, and record it.

        Args:
            loss: The user's loss.
            source: Where it comes from, for the error.

        Raises:
            UserError: It has no gradient.
        """
        check_loss(loss, source)
        if self.note_loss is not None:
            self.note_loss(loss)

    def call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Call the user's step, through the ``forward`` of a wrapper if there is one."""
        return getattr(self.module, f"{stage}_step")(batch, batch_idx)

    def begin_evaluation(self) -> None:
        """Synchronize buffers, so that the result does not depend on which rank reads a sample."""

    def end_evaluation(self) -> None:
        """Called after an evaluation, also a failed one: training continues as before it."""

    def move(self, batch: Any) -> Any:
        """Move a batch to the module's device, and cast it to its data type."""
        if not self._moves:
            return batch
        return moving.move(batch, self.device, self.precision.parameter_dtype)

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        """Compute the gradients of a loss, and accumulate them."""
        self.precision.scale(loss).backward()

    # --- a step --------------------------------------------------------------------------------

    @property
    def learning_rate_factor(self) -> float:
        """Factor by which the strategy itself multiplies learning rates."""
        return 1.0

    def clip_gradients(
        self, optimization: Optimization, value: float, algorithm: str
    ) -> Tensor | None:
        """Clip the gradients of the whole model, by global ``"norm"`` or by ``"value"``.

        With an infinite ``value``, the norm is only computed.

        Returns:
            The norm before clipping, on the device, to be logged; ``None`` if it is not computed.
        """
        self.precision.unscale(optimization.optimizers)
        return clip_gradients(optimization.parameters, value, algorithm)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Step one optimizer."""
        self.precision.step(optimizer)

    def end_step(self) -> None:
        """Called after the last optimizer of a step."""
        self.precision.update()

    def has_skipped_step(self) -> bool:
        """Whether a step was skipped since the last call, because gradients were not finite.

        The same on all processes. With a gradient scaler, it waits for the device.
        """
        return self.precision.has_skipped_step()

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Reset the gradients of an optimizer's parameters."""
        optimizer.zero_grad(set_to_none=True)

    def end_fit(self) -> None:
        """Called once all steps are made and saved: leave the trained weights in the module."""

    def agreed_signal(self, received: int) -> int:
        """Tell the peers of a signal; return the one on which all stop after this step, or 0.

        Called after each step if ranks do not take steps together. Peers stop after the same number
        of their own steps.

        Args:
            received: The signal that this rank received, or 0.
        """
        return received

    def step_values(self) -> dict[str, float]:
        """The strategy's own values, to log with a step on the main rank."""
        return {}

    # --- all processes -------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        """Reduce a value over all data-parallel replicas, for logging."""
        return collectives.all_reduce(tensor, how)

    # --- checkpoints ---------------------------------------------------------------------------

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        """State of model and optimizers by parameter name: the same form with every strategy."""
        optimizers = optimization.optimizers if optimization else []
        return {
            "model": self.model_state(),
            "optimizers": [self.optimizer_state(optimizer) for optimizer in optimizers],
        }

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        """Load a state of :meth:`state` of any strategy, after :meth:`setup`.

        Args:
            state: State of model and optimizers; its tensors may be ``Stored``, not read yet.
            optimization: The optimizers to load; ``None``: load the model only.
        """
        self.load_model(state["model"])
        if optimization is not None:
            pairs = zip(optimization.optimizers, state["optimizers"], strict=True)
            for optimizer, saved in pairs:
                self.load_optimizer(optimizer, saved)

    def model_state(self) -> dict[str, Any]:
        """The model's part of :meth:`state`."""
        return dict(self.module.state_dict())

    def load_model(self, saved: Mapping[str, Any]) -> None:
        """Load a state of :meth:`model_state` of any strategy."""
        self.module.load_state_dict(stored_tensors.read_all(saved))

    def weights(self) -> LocalWeights:
        """The parameters in this process, to average them; called after :meth:`setup`."""
        return LocalWeights(self.module.named_parameters(remove_duplicate=False))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's part of :meth:`state`."""
        return optimizer_state(optimizer, parameter_names(self.module))

    def load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Load a state of :meth:`optimizer_state` of any strategy."""
        names = parameter_names(self.module)
        load_optimizer_state(optimizer, stored_tensors.read_all(saved), names)

    def rank_local_state(self) -> dict[str, Tensor]:
        """Rank-local state, for example of a gradient compression."""
        return {}

    def load_rank_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's :meth:`rank_local_state`."""

    def waits_for_peers(self) -> bool:
        """Whether :meth:`teardown` would wait forever for peers if only this process has failed."""
        return False

    def teardown(self) -> None:
        """Undo :meth:`connect`."""
