"""Create the feed of a loader: in the global order, or of a loader that is read as it is."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from ..errors import UserError
from . import scaling
from .batch_limit import ALL, BatchLimit
from .feed import Feed, OrderedFeed, ReplayFeed, Share
from .sampling import BatchPlan, GlobalOrder, can_be_ordered, needs_keys, order_globally


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

    Args:
        loader: The user's loader.
        share: The replica that reads.
        accumulate: Micro-batches per optimizer step.
        global_batch_size: Replaces the loader's batch size if the trainer controls the order.
        in_global_order: False reads the loader as it is.
        uneven: As in :class:`ReplayFeed`.
        limit: Batches of each replica to read of each epoch, a multiple of ``accumulate``; a
            fraction is one of its steps.
        repeats: Read the first epoch again and again.

    Raises:
        UserError: The dataset is empty, or the limit does not fit the loader.
    """
    if not (in_global_order and can_be_ordered(loader)):
        if repeats:
            raise UserError(
                f"{limit.option}={limit.value!r}: the training loader is read as it is, and may "
                "not repeat its batches; use a map-style dataset, torch's own samplers and "
                "use_distributed_sampler=True, or limit_train_batches"
            )
        replayed = ReplayFeed(loader, share, accumulate, uneven, limit)
        scaling.check_batches(replayed.batches, accumulate)
        return replayed
    batch_size = loader.batch_size or 1
    if global_batch_size is not None:
        batch_size = scaling.device_batch_size(global_batch_size, share.replicas, accumulate)
    samples = _samples(loader)
    scaling.check_samples(samples, batch_size, share.replicas, accumulate, global_batch_size)
    plan = BatchPlan(samples, batch_size, share.replicas, accumulate, loader.drop_last)
    _refuse_empty(samples)
    if plan.batches == 0:
        raise UserError("the dataset is empty: there is nothing to read")
    return _ordered(loader, _limited(plan, limit), share, shuffle=True, fill=True, repeats=repeats)


def _limited(plan: BatchPlan, limit: BatchLimit) -> BatchPlan:
    if limit.is_none:
        return plan
    if type(limit.value) is int:
        return replace(plan, most=limit.value * plan.micro_batch)
    return replace(plan, most=limit.of(plan.steps) * plan.global_batch)


def feed_evaluation(
    loader: Iterable[Any],
    share: Share,
    *,
    in_global_order: bool,
    together: bool = False,
    limit: BatchLimit = ALL,
) -> Feed:
    """Feed for validation, test or prediction: each sample once, in order.

    Args:
        loader: The user's loader.
        share: The replica that reads.
        in_global_order: False reads the loader as it is.
        together: Give every replica the same number of batches; padding batches have no samples
            that count.
        limit: Batches of the loader to read, which are divided among the replicas: the samples
            depend on no layout. Of a loader that is read as it is, batches of each replica.

    Raises:
        UserError: The dataset is empty, or the limit does not fit the loader.
    """
    if not (in_global_order and can_be_ordered(loader)):
        return ReplayFeed(loader, share, 1, "join" if together else "allow", limit)
    samples, size = _samples(loader), loader.batch_size or 1
    _refuse_empty(samples)
    most = None if limit.is_none else limit.of(-(-samples // size)) * size
    plan = BatchPlan(samples, size, share.replicas, most=most)
    return _ordered(loader, plan, share, shuffle=False, fill=together)


def feed_first(
    loader: Iterable[Any], share: Share, *, in_global_order: bool, batches: int
) -> Feed | None:
    """Feed of the first batches of an evaluation, in which all replicas read the same number.

    Args:
        loader: The user's loader.
        share: The replica that reads.
        in_global_order: As in :func:`feed_evaluation`.
        batches: Number of batches of each replica.

    Returns:
        The feed; ``None`` for a loader that is read as it is: reading it might change what it
        yields later.
    """
    if not (in_global_order and can_be_ordered(loader)):
        return None
    limit = BatchLimit("sanity_check", batches * share.replicas)
    return feed_evaluation(loader, share, in_global_order=True, together=True, limit=limit)


def feed_trained(loader: Iterable[Any], share: Share, *, training: Feed, together: bool) -> Feed:
    """Feed for validation on the samples of a training feed that repeats its first epoch.

    Args:
        loader: The training loader.
        share: The replica that reads.
        training: Its training feed, of :func:`feed_training`.
        together: As in :func:`feed_evaluation`.
    """
    if not (isinstance(training, OrderedFeed) and can_be_ordered(loader)):
        raise TypeError("only a feed in the global order repeats an epoch")
    plan = replace(training.plan, replicas=share.replicas, accumulate=1, drop_last=False)
    plan = replace(plan, most=training.plan.samples_used)
    return _ordered(loader, plan, share, shuffle=True, fill=together)


def _ordered(
    loader: DataLoader[Any],
    plan: BatchPlan,
    share: Share,
    *,
    shuffle: bool,
    fill: bool,
    repeats: bool = False,
) -> OrderedFeed:
    keyed = needs_keys(loader)
    order = GlobalOrder(
        plan, share.replica, seed=share.seed, shuffle=shuffle, keyed=keyed, fill=fill
    )
    return OrderedFeed(order_globally(loader, order), order, share.seed, repeats)


def _refuse_empty(samples: int) -> None:
    if samples == 0:
        raise UserError("the dataset is empty: it has no samples to make batches of")


def _samples(loader: DataLoader[Any]) -> int:
    return len(loader.dataset)  # type: ignore[arg-type]
