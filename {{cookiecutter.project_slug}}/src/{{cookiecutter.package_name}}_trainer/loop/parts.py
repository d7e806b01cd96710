"""The parts of a fit, which the loop and its checkpoints share."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callbacks.calls import HookCalls
from ..checkpoint.left_out import LeftOut
from ..data import Feed, MicroBatch, moving
from ..errors import UserError, shown
from ..launch import collectives
from ..launch.hangs import timer
from ..logging.outputs import Outputs
from ..logging.progress import Speed
from ..module import TrainingModule, hooks
from ..options import Options
from ..strategies import Strategy
from ..strategies.optimizers import Optimization
from .position import Position

if TYPE_CHECKING:
    from .compilation import Compiled
    from .manual_optimization import ManualOptimization


FROZEN, EVAL_MODE, TOTAL_STEPS = "frozen parameters", "layers in eval mode", "total_steps"
"""Names in ``FitParts.configured``, beside those of ``strategies.optimizers.described``."""


def frozen(module: TrainingModule) -> list[str]:
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def in_eval_mode(module: TrainingModule) -> list[str]:
    """Names of the layers that are in evaluation mode between evaluations."""
    return [name for name, layer in module.named_modules() if not layer.training]


@dataclass(frozen=True)
class FitParts:
    options: Options
    module: TrainingModule
    strategy: Strategy
    optimization: Optimization  # which ``setup`` returned
    manual: "ManualOptimization | None"  # only for a module with manual optimization
    feed: Feed  # of training batches
    outputs: Outputs
    position: Position
    calls: HookCalls  # of callbacks and of the module
    configured: dict[str, Any]  # what a resume compares with a checkpoint, see :mod:`.resuming`
    compiled: "Compiled | None"  # what is compiled of the module
    left_out: LeftOut | None


def read(
    strategy: Strategy, feed: Feed, epoch: int, start: int, speed: Speed | None = None
) -> Iterator[MicroBatch]:
    """Read the batches of an epoch on a strategy's devices; ``speed`` measures the waits."""
    devices, dtype = strategy.data.devices, strategy.precision.parameter_dtype
    batches, clock = moving.ahead(feed.epoch(epoch, start), devices, dtype), time.perf_counter
    started = clock()
    if timer.is_armed:
        timer.begin("evaluation" if speed is None else "training")
    try:
        for batch in batches:
            if speed is not None:
                speed.waited += clock() - started
                if speed.count_tokens is not None:
                    speed.tokens += speed.count_tokens(batch)
            yield batch
            if timer.is_armed:
                timer.note_batch()
            started = clock()
    finally:
        if timer.is_armed:
            timer.pause()


def gathered(outputs: Sequence[Any], device: torch.device) -> Any:
    """Outputs of a micro-batch as hooks get them: detached from the autograd graph.

    Several, of a divided batch, are gathered on ``device`` as ``dp`` does; ``None`` without any.
    """
    parts = [moving.mapped_tensors(output, Tensor.detach) for output in outputs]
    if not parts:
        return None
    output = parts[0]
    if len(parts) > 1:
        from ..strategies.replicated.dp import gather

        output = gather(parts, device)
    return {"loss": output} if isinstance(output, Tensor) else output


def speed_of(fit: FitParts) -> Speed:
    """Create what measures the speed of a fit; only the main rank counts tokens."""
    module, samples, peak = fit.module, fit.feed.samples_per_step, fit.options.peak_flops

    def count_tokens(batch: MicroBatch) -> int:
        count = module.count_tokens(batch.data) if batch.samples else 0
        if not isinstance(count, int):  # a tensor would make the host wait for the device
            raise UserError(
                f"{type(module).__name__}.count_tokens returned {shown(count)}: return an int, for "
                "example batch.numel()"
            )
        return count * fit.strategy.data.replicas

    peak_samples = None
    counts = collectives.rank() == 0 and hooks.is_overridden(module, TrainingModule, "count_tokens")
    if peak is not None and module.flops_per_sample:
        if samples is None:
            raise UserError("peak_flops: the loader has no batch_size; leave peak_flops out")
        devices = collectives.world_size() * len(fit.strategy.data.devices)
        peak_samples = peak * devices / module.flops_per_sample
    return Speed(samples, count_tokens if counts else None, peak_samples)
