"""Create the feed of a loader: in the global order, or of a loader that is read as it is."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader

from ..errors import ConfigurationError, UserError
from . import sampling
from .feed import Feed, OrderedFeed, length
from .sampling import BatchPlan, Share, can_be_ordered


@dataclass(frozen=True)
class BatchLimit:
    """How many batches of an epoch are read: an option, and a number or fraction; 1.0 is all."""

    option: str
    value: int | float

    def of(self, batches: int | None, accumulate: int = 1) -> int | None:
        """The number of batches to read at most; ``None``: all. Fractions of steps are cut off."""
        if type(self.value) is int:
            return self.value
        if self.value >= 1:
            return None
        option = f"{self.option}={self.value!r}:"
        if batches is None:
            raise UserError(f"{option} the loader has no length; give a whole number")
        steps = -(-batches // accumulate)
        limited = int(round(steps * self.value, 6))  # 0.3 of 10 is 3, whatever its last bit
        if limited < 1 <= steps:
            advice = "give a larger one, or a whole number"
            raise UserError(f"{option} this fraction of {steps} is less than 1; {advice}")
        return limited * accumulate


ALL = BatchLimit("", 1.0)  # no limit
_UNUSED = "the training loader's generator is not used: seed draws the samples of each epoch"
_IN_ORDER = "in_order=False is not used: batches are read in the order that seed draws"


def device_batch_size(global_batch_size: int, replicas: int, accumulate: int) -> int:
    """The batch size of one replica's micro-batch; ConfigurationError if it is no integer."""
    shares = replicas * accumulate
    if global_batch_size < 1 or global_batch_size % shares:
        below = max(1, global_batch_size // shares) * shares
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is not divisible by {replicas} replicas times "
            f"accumulate_grad_batches={accumulate}; the nearest divisible sizes are "
            f"{below} and {below + shares}"
        )
    return global_batch_size // shares


def feed_training(
    loader: Iterable[Any],
    share: Share,
    *,
    accumulate: int,
    global_batch_size: int | None,
    in_global_order: bool,
    uneven: str = "refuse",
    limit: BatchLimit = ALL,
    repeats: bool = False,
) -> Feed:
    """Feed for training: reshuffled each epoch, and every replica takes part in every step.

    ``in_global_order``: False reads the loader as it is, with ``uneven`` as in
    :class:`~.replay.ReplayFeed`. ``limit``: batches of each replica to read of an epoch, a multiple
    of ``accumulate``. ``repeats``: read the first epoch again and again.
    """
    if in_global_order and can_be_ordered(loader):
        batches = cast(BatchSampler, loader.batch_sampler)
        size = batches.batch_size
        if global_batch_size is not None:
            size = device_batch_size(global_batch_size, share.replicas, accumulate)
        samples = _samples(loader, "training")
        plan = BatchPlan(samples, size, share.replicas, accumulate, batches.drop_last)
        if plan.samples < plan.global_batch:
            setting = f"batch_size={size} x {share.replicas} replicas x accumulate_grad_batches="
            setting = "global_batch_size=" if global_batch_size else f"{setting}{accumulate} = "
            than = f"the {plan.samples} of the dataset; use at most {plan.samples}"
            problem = f"an optimizer step takes more samples than {than}"
            raise ConfigurationError(f"{setting}{plan.global_batch}: {problem}")
        most = limit.of(plan.batches, accumulate)
        plan = replace(plan, most=None if most is None else most * plan.micro_batch)
        feed = _ordered(loader, plan, share, shuffle=True, fill=True, repeats=repeats)
        has_generator = getattr(batches.sampler, "generator", None) is not None
        feed.remarks = [_UNUSED] * has_generator + [_IN_ORDER] * (not loader.in_order)
        return feed
    if repeats:
        raise UserError(
            f"{limit.option}={limit.value!r}: the training loader is read as it is, and may "
            "not repeat its batches; use a map-style dataset, torch's own samplers and "
            "use_distributed_sampler=True, or limit_train_batches"
        )
    replayed = _replayed(loader, share, accumulate, uneven, limit)
    if replayed.batches is not None and 0 < replayed.batches < accumulate:
        problem = f"an optimizer step takes more batches than the {replayed.batches} of the loader"
        advice = f"use at most {replayed.batches}"
        raise ConfigurationError(f"accumulate_grad_batches={accumulate}: {problem}; {advice}")
    return replayed


def feed_evaluation(
    loader: Iterable[Any],
    share: Share,
    *,
    in_global_order: bool,
    together: bool = False,
    limit: BatchLimit = ALL,
) -> Feed:
    """Feed for validation, test or prediction: each sample once, in order.

    ``together``: every replica gets the same number of batches; samples of padding batches do not
    count. ``limit``: batches of the loader, divided among the replicas, so that the samples depend
    on no layout; of a loader that is read as it is, batches of each replica.
    """
    if not (in_global_order and can_be_ordered(loader)):
        return _replayed(loader, share, 1, "join" if together else "allow", limit)
    sampler = cast(BatchSampler, loader.batch_sampler)
    samples, size = _samples(loader, "evaluation"), sampler.batch_size
    batches = samples // size if sampler.drop_last else -(-samples // size)
    if not batches:
        raise UserError(f"drop_last=True leaves no batch: {samples} samples, batch_size={size}")
    limited = limit.of(batches)
    most = (batches if limited is None else min(batches, limited)) * size
    plan = BatchPlan(samples, size, share.replicas, most=most, keeps_batches=True)
    return _ordered(loader, plan, share, shuffle=False, fill=together)


def feed_sanity_check(
    loader: Iterable[Any], share: Share, *, in_global_order: bool, batches: int
) -> Feed | None:
    """Feed of the first batches of an evaluation, the same number for each replica.

    ``None`` for a loader that is read as it is: reading it might change what it yields later.
    """
    if not (in_global_order and can_be_ordered(loader)):
        return None
    limit = BatchLimit("sanity_check", batches * share.replicas)
    return feed_evaluation(loader, share, in_global_order=True, together=True, limit=limit)


def feed_overfit(loader: Iterable[Any], share: Share, *, training: Feed, together: bool) -> Feed:
    """Feed for validation on the samples of a training feed that repeats its first epoch."""
    if not (isinstance(training, OrderedFeed) and can_be_ordered(loader)):
        raise TypeError("only a feed in the global order repeats an epoch")
    plan, most = training.plan, training.plan.samples_used
    plan = replace(plan, replicas=share.replicas, accumulate=1, drop_last=False, most=most)
    return _ordered(loader, plan, share, shuffle=True, fill=together)


def _replayed(
    loader: Iterable[Any], share: Share, accumulate: int, uneven: str, limit: BatchLimit
) -> Feed:
    from .replay import ReplayFeed

    return ReplayFeed(loader, share, accumulate, uneven, limit.of(length(loader), accumulate))


def _ordered(
    loader: DataLoader[Any],
    plan: BatchPlan,
    share: Share,
    *,
    shuffle: bool,
    fill: bool,
    repeats: bool = False,
) -> OrderedFeed:
    keyed = sampling.needs_keys(loader)
    order = sampling.GlobalOrder(plan, share.replica, share.seed, shuffle, keyed, fill)
    order.is_held, order.sampler = plan.samples <= sampling.MOST_HELD, sampling.own_draws(loader)
    return OrderedFeed(loader, order, share, repeats)


def _samples(loader: DataLoader[Any], stage: str) -> int:
    """Samples of an epoch: those of the dataset, or those that its sampler draws."""
    if len(cast(Any, loader.dataset)) == 0:
        raise UserError(f"the dataset of {stage} is empty: it has no samples to make batches of")
    return len(cast(Any, sampling.own_draws(loader) or loader.dataset))
