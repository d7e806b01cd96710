"""``find_learning_rate``: train a copy of the module at rates that grow from step to step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Feed, MicroBatch, randomness
from ..errors import ConfigurationError, UserError
from ..launch import collectives
from ..launch.cluster import Layout
from ..module import TrainingModule
from ..options import Options
from ..strategies import BatchSkipped, SingleDevice, Strategy
from ..strategies.optimizers import Optimization, configured
from ..strategies.precision import Precision
from .batch_size_trial import copied

_SMOOTHING = 0.8
# The loss has diverged when it has grown by this multiple of the first one.
_DIVERGED = 3.0
# Part of the first loss by which it must fall in a step.
_LEAST = 1e-6


@dataclass(frozen=True)
class Sweep:
    """The learning rates to try, one per step: from ``lowest`` to ``highest``, in equal ratios.

    Raises:
        ConfigurationError: A number is out of range.
    """

    lowest: float = 1e-7
    highest: float = 1.0
    steps: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.highest < math.inf:
            raise ConfigurationError(
                f"find_learning_rate: lowest={self.lowest!r} and highest={self.highest!r}: give "
                "numbers above 0, the lowest first"
            )
        if self.steps < 20:
            raise ConfigurationError(f"find_learning_rate: steps={self.steps!r}: give at least 20")

    @property
    def rates(self) -> list[float]:
        """The rate of each step."""
        ratio = self.highest / self.lowest
        return [self.lowest * ratio ** (step / (self.steps - 1)) for step in range(self.steps)]


def problems_of(name: str, strategy: Strategy, module: TrainingModule) -> list[str]:
    """One line for each reason not to try rates on copies of a module that ranks train together."""
    lines = []
    if not module.automatic_optimization:
        lines.append(
            "find_learning_rate: with manual optimization, training_step steps the optimizers; set "
            "their rates in configure_optimizers"
        )
    if strategy.shards_parameters or "parameter_averaging" in strategy.limits.refused:
        lines.append(
            f"find_learning_rate: strategy={name!r} does not train the same whole model on each "
            "rank; use strategy='ddp' with the same effective batch size"
        )
    return lines


class Tried(NamedTuple):
    """A step's rate and loss, and the loss of the initial weights on the same samples."""

    rate: float
    loss: float
    initial: float

    @property
    def change(self) -> float:
        """What training has changed, without the noise of different samples."""
        return self.loss - self.initial


def try_rates(
    module: TrainingModule, feed: Feed, device: torch.device, options: Options, sweep: Sweep
) -> list[Tried]:
    """Make a step at each rate; the ranks average their gradients, as under ``ddp``.

    Args:
        module: The user's; it is not changed.
        feed: Training batches of this replica.
        device: Device of this process.
        options: The trainer's.
        sweep: The rates.

    Returns:
        Losses over the global batch before each step, the same on every rank; of fewer steps than
        the sweep has if the loss has diverged.
    """
    trained, untrained = _alone(device, options), _alone(device, options)
    tried = copied(module)
    optimization = trained.setup(tried, lambda: configured(tried))
    if collectives.world_size() > 1:
        for each in tried.state_dict().values():
            collectives.broadcast_in_place(each)
    untrained.place(copied(tried))
    first = optimization.configured_rates()[0]
    if not first > 0:
        raise UserError(
            "find_learning_rate: the first parameter group of configure_optimizers has the rate "
            f"{first}; give one above 0, to which the others are in proportion"
        )
    found: list[Tried] = []
    for rate, batches in zip(sweep.rates, _steps(trained, feed), strict=False):
        losses = [_losses(trained, untrained, batch) for batch in batches]
        _average_gradients(optimization.parameters)
        with optimization.rates_multiplied(rate / first):
            _step(trained, optimization, options)
        mean = collectives.all_reduce(torch.stack(losses).sum(0).double(), "mean").tolist()
        found.append(Tried(rate, *mean))
        changes = _smoothed([each.change for each in found])
        if not changes[-1] < _DIVERGED * found[0].initial:  # also if it is NaN
            break
    return found


def _alone(device: torch.device, options: Options) -> Strategy:
    alone = SingleDevice()
    alone.connect(Layout(), [device], Precision(str(options.precision), device.type))
    return alone


def _steps(strategy: Strategy, feed: Feed) -> Iterator[list[MicroBatch]]:
    """The micro-batches of each step, epoch by epoch."""
    for epoch in count():
        batches = strategy.batches(feed, epoch, 0)
        while found := list(islice(batches, feed.accumulate)):
            yield found


def _losses(trained: Strategy, untrained: Strategy, batch: MicroBatch) -> Tensor:
    """The weighted losses of both, with the same random numbers; accumulates gradients."""
    losses: list[Tensor] = []
    state = randomness.full_state(trained.devices)
    trained.note_loss = losses.append
    try:
        trained.forward_backward(batch.data, batch.number, weight=batch.weight, synchronize=True)
    except BatchSkipped:
        raise UserError(
            f"find_learning_rate: training_step returned None for batch {batch.number}, which so "
            "has no loss to compare; leave such batches out of the data"
        ) from None
    randomness.set_full_state(state, trained.devices)
    with torch.no_grad():
        outputs = untrained.forward("training", batch.data, batch.number)
        losses.append(untrained.read_loss(outputs))
    return torch.stack([each.detach().reshape(()) for each in losses]) * batch.weight


def _average_gradients(parameters: Sequence[Tensor]) -> None:
    if collectives.world_size() == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
    mean = collectives.all_reduce(torch.cat([each.flatten() for each in gradients]), "mean")
    parts = mean.split([each.numel() for each in gradients])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def _step(strategy: Strategy, optimization: Optimization, options: Options) -> None:
    if options.gradient_clip_val is not None:
        algorithm = options.gradient_clip_algorithm
        strategy.clip_gradients(optimization, options.gradient_clip_val, algorithm)
    for optimizer in optimization.optimizers:
        strategy.optimizer_step(optimizer)
    strategy.end_step()
    for optimizer in optimization.optimizers:
        strategy.zero_grad(optimizer)


def _smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average, corrected for its start."""
    smoothed, mean = [], 0.0
    for number, value in enumerate(values, 1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
        smoothed.append(mean / (1 - _SMOOTHING**number))
    return smoothed


def suggest(tried: Sequence[Tried]) -> float:
    """The rate at which the loss falls most steeply, over the logarithm of rates.

    Raises:
        UserError: It falls nowhere.
    """
    falls = [before - after for before, after in pairwise(_smoothed([t.change for t in tried]))]
    steepest = max(range(len(falls)), key=falls.__getitem__, default=None)
    if steepest is None or not falls[steepest] > _LEAST * abs(tried[0].initial):
        raise UserError(
            f"find_learning_rate: the loss does not fall at any rate from {tried[0].rate:g} to "
            f"{tried[-1].rate:g}; give another lowest and highest, or more steps"
        )
    return tried[steepest].rate
