"""The parts of a fit, which the loop and its checkpoints share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..callbacks import HookCalls
from ..data import Feed, MicroBatch, moving
from ..errors import UserError, shown
from ..logging import Outputs, Speed
from ..module import TrainingModule, is_overridden
from ..options import Options
from ..strategies import Strategy
from ..strategies.optimizers import Optimization
from ..strategies.replicated.dp import gather
from .manual_optimization import ManualOptimization
from .position import Position


@dataclass(frozen=True)
class FitParts:
    """The parts of a fit, after the strategy's ``setup``.

    ``optimization``: the optimizers that ``setup`` returned; ``manual``: only for a module with
    manual optimization; ``feed``: training batches; ``outputs``: where values are logged;
    ``calls``: hooks of callbacks and of the module; ``flops_per_sample``: if MFU is logged.
    """

    options: Options
    module: TrainingModule
    strategy: Strategy
    optimization: Optimization
    manual: ManualOptimization | None
    feed: Feed
    outputs: Outputs
    position: Position
    calls: HookCalls
    flops_per_sample: float | None = None


class StepOutputs:
    """Collects what ``training_step`` returned for a micro-batch, for hooks: several if its
    strategy divides it.

    Args:
        device: Where several are gathered.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Any] = []

    def note(self, outputs: Any) -> None:
        """Keep outputs, without their gradients."""
        self._parts.append(moving.mapped(outputs, _detached))

    def take(self) -> Any:
        """The outputs since the last call, gathered as ``dp`` does; ``None`` without any."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        outputs = parts[0] if len(parts) == 1 else gather(parts, self._device)
        return {"loss": outputs} if isinstance(outputs, Tensor) else outputs


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def speed_of(fit: FitParts) -> Speed:
    """Create what measures the speed of a fit; only the main rank counts tokens.

    Raises:
        UserError: ``peak_flops`` is given, and the loader has no batch size.
    """
    module, samples, peak = fit.module, fit.feed.samples_per_step, fit.options.peak_flops

    def count_tokens(batch: MicroBatch) -> int:
        count = module.count_tokens(batch.data) if batch.samples else 0
        if not isinstance(count, int):  # a tensor would make the host wait for the device
            raise UserError(
                f"{type(module).__name__}.count_tokens returned {shown(count)}: return an int, for "
                "example batch.numel()"
            )
        return count * fit.strategy.data_replicas

    layout, peak_samples = fit.strategy.layout, None
    counts = layout.is_main and is_overridden(module, TrainingModule, "count_tokens")
    if peak is not None and fit.flops_per_sample:
        if samples is None:
            raise UserError("peak_flops: the loader has no batch_size; leave peak_flops out")
        devices = layout.world_size * len(fit.strategy.devices)
        peak_samples = peak * devices / fit.flops_per_sample
    return Speed(samples, count_tokens if counts else None, peak_samples)
