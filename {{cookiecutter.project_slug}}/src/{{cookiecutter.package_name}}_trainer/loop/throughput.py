"""Measure the speed of a fit, in the units that its module defines."""

from ..data import MicroBatch
from ..errors import UserError, shown
from ..logging import Speed
from ..module import TrainingModule, is_overridden
from .parts import FitParts


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

    layout = fit.strategy.layout
    counts = layout.is_main and is_overridden(module, TrainingModule, "count_tokens")
    peak_samples = None
    if peak is not None and fit.flops_per_sample:
        if samples is None:
            raise UserError("peak_flops: the loader has no batch_size; leave peak_flops out")
        devices = layout.world_size * len(fit.strategy.devices)
        peak_samples = peak * devices / fit.flops_per_sample
    return Speed(samples, count_tokens if counts else None, peak_samples)
