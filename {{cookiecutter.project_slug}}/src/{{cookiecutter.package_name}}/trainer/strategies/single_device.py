"""``single_device``: one process, one device; and, in the simplest form, what every strategy is.

A strategy says what is done with parameters, gradients and data, and nothing else: how processes
come to be is a launcher's business, who this process is the cluster's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import devices, distributed
from ..cluster import Layout
from ..distributed import How
from ..module import TrainingModule
from ..optimization import (
    Optimization,
    clip_gradients,
    load_optimizer_state,
    optimizer_state,
    parameter_names,
)
from ..precision import NAMES, Precision

Stage = Literal["training", "validation", "test", "predict"]


@dataclass(frozen=True)
class Limits:
    """What a strategy cannot do, for checks before a run, for tables and for tests.

    Args:
        precisions: that it can compute in.
        max_devices: of one process group; ``None``: any number.
        accelerators: that it runs on.
    """

    precisions: tuple[str, ...] = NAMES
    max_devices: int | None = None
    accelerators: tuple[str, ...] = ("cpu", "cuda")

    def problems(self, name: str, accelerator: str, precision: str, device_count: int) -> list[str]:
        """One line for each thing asked of the strategy that it cannot do."""
        lines = []
        if precision in NAMES and precision not in self.precisions:
            can = ", ".join(self.precisions)
            lines.append(f"strategy={name!r} cannot compute in {precision!r}; it can in {can}")
        if accelerator not in self.accelerators:
            on = " or ".join(self.accelerators)
            lines.append(f"strategy={name!r} runs on {on}, not on {accelerator}")
        if self.max_devices is not None and device_count > self.max_devices:
            lines.append(
                f"strategy={name!r} uses {self.max_devices} device and {device_count} were asked "
                "for; use strategy='ddp', or devices=1"
            )
        return lines


class StepModule(nn.Module):
    """A module whose ``forward`` is the user's step, for engines that wrap a ``forward``."""

    def __init__(self, module: TrainingModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run ``training_step``, ``validation_step``, … on a batch."""
        return getattr(self.module, f"{stage}_step")(batch, batch_idx)


class SingleDevice:
    """One process on one device, and the contract of all strategies.

    The trainer calls :meth:`connect`, then :meth:`setup`, then for each micro-batch
    :meth:`forward_backward`, for each step :meth:`clip_gradients`, :meth:`optimizer_step` for each
    optimizer, :meth:`end_step` and :meth:`zero_grad`, and at last :meth:`teardown`.
    """

    limits: ClassVar[Limits] = Limits(max_devices=1)

    layout: Layout
    device: torch.device
    precision: Precision
    module: TrainingModule

    # --- before the first step -----------------------------------------------------------------

    def connect(self, layout: Layout, device: torch.device, precision: Precision) -> None:
        """Take this process' place among its siblings: form the process group."""
        self.layout, self.device, self.precision = layout, device, precision
        self._moves = device.type != "cpu"
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        """Move, wrap and shard a module, and make its optimizers when the time is right.

        Args:
            module: the user's, on the CPU.
            configure: makes the optimizers. Called before or after the module is wrapped, as the
                engine needs it; what it gave may be replaced.

        Returns:
            the optimizers to step.
        """
        self.place(module)
        return configure()

    def place(self, module: TrainingModule) -> None:
        """Put parameters and buffers on the device; all there is to do where nothing is trained."""
        self.module = module.to(self.device)
        module._device = self.device

    @staticmethod
    def local_processes(devices: int) -> int:
        """How many processes a node runs for so many devices."""
        return 1

    @staticmethod
    def replicas(devices: int, num_nodes: int) -> int:
        """Among how many readers a global batch is divided on so many devices a node."""
        return 1

    @property
    def data_replicas(self) -> int:
        """Among how many readers a global batch is divided."""
        return 1

    @property
    def data_index(self) -> int:
        """Which of them this process is."""
        return 0

    # --- a micro-batch -------------------------------------------------------------------------

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronise: bool
    ) -> None:
        """The user's ``training_step`` on a micro-batch, then backward.

        Args:
            batch: as the loader gave it.
            batch_idx: of the micro-batch in its epoch.
            weight: factor of the loss, so that the average over replicas, summed over a step's
                micro-batches, is the mean over the global batch.
            synchronise: False while gradients are accumulated: they need not be averaged yet.
        """
        loss = read_loss(self.forward("training", batch, batch_idx))
        self.backward(loss if weight == 1.0 else loss * weight, synchronise=synchronise)

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """A step of a stage, and what the user does at its end (``*_step_end``)."""
        batch = self.move(batch)
        if self.precision.dtype is None:
            return self._step(stage, batch, batch_idx)
        with self.precision.autocast():
            return self._step(stage, batch, batch_idx)

    def _step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = self.call_step(stage, batch, batch_idx)
        if stage == "predict":
            return outputs
        return getattr(self.module, f"{stage}_step_end")(outputs)

    def call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run the user's step; the place where a wrapped module's ``forward`` is called instead."""
        return getattr(self.module, f"{stage}_step")(batch, batch_idx)

    def begin_evaluation(self) -> None:
        """Make every process' module the same, so that it does not matter which sees a sample."""

    def move(self, batch: Any) -> Any:
        """The batch where the module is."""
        return devices.move(batch, self.device) if self._moves else batch

    def backward(self, loss: Tensor, *, synchronise: bool) -> None:
        """Gradients of a loss, added to what is there."""
        self.precision.scale(loss).backward()

    # --- a step --------------------------------------------------------------------------------

    def clip_gradients(self, optimization: Optimization, value: float, algorithm: str) -> None:
        """Clip the gradients of the whole model: ``"norm"`` or each ``"value"``."""
        for optimizer in optimization.optimizers:
            self.precision.unscale(optimizer)
        clip_gradients(optimization.parameters, value, algorithm)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Step one optimizer."""
        self.precision.step(optimizer)

    def end_step(self) -> None:
        """After the last optimizer of a step."""
        self.precision.update()

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Forget the gradients of an optimizer's parameters."""
        optimizer.zero_grad(set_to_none=True)

    # --- all processes -------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        """A value over all data replicas, for logging."""
        return distributed.all_reduce(tensor, how)

    # --- checkpoints ---------------------------------------------------------------------------

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        """Model and optimizers by parameter names: the same form under every strategy."""
        names = parameter_names(self.module)
        optimizers = optimization.optimizers if optimization else []
        return {
            "model": dict(self.module.state_dict()),
            "optimizers": [optimizer_state(optimizer, names) for optimizer in optimizers],
        }

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        """Put back what :meth:`state` of any strategy gave, after :meth:`setup`.

        Args:
            state: of model and optimizers.
            optimization: the optimizers to fill; ``None``: the model alone.
        """
        self.module.load_state_dict(state["model"])
        if optimization is not None:
            names = parameter_names(self.module)
            pairs = zip(optimization.optimizers, state["optimizers"], strict=True)
            for optimizer, saved in pairs:
                load_optimizer_state(optimizer, saved, names)

    def teardown(self) -> None:
        """Undo :meth:`connect`."""


def read_loss(outputs: Any) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        TypeError: there is none, or it is not a scalar.
    """
    if isinstance(outputs, Tensor) and outputs.numel() == 1:
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise TypeError(
            f"training_step must return a scalar loss, or a dict with 'loss'; it gave {found}"
        )
    return loss
