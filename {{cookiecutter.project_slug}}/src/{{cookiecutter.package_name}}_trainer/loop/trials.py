"""``find_batch_size`` and ``find_learning_rate``: training steps on copies of the module."""

import copy
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..data import Feed, MicroBatch, moving, randomness
from ..errors import ConfigurationError, UserError, one_line
from ..launch import collectives
from ..launch.cluster import Layout
from ..logging import BatchContext
from ..module import TrainingModule
from ..options import Options
from ..strategies import BatchSkipped, SingleDevice, Strategy
from ..strategies.base import read_loss
from ..strategies.optimizers import Optimization, configured
from ..strategies.precision import Precision
from .manual_optimization import ManualOptimization
from .parts import read

_SMOOTHING = 0.8
_DIVERGED = 3.0  # times the first loss that it has grown by
_LEAST = 1e-6  # part of the first loss by which it must fall in a step
_MEMORY_MESSAGES = (  # messages of CPU, CUDA, cuBLAS and cuDNN errors that are plain RuntimeErrors
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "std::bad_alloc",
)


def _alone(device: torch.device, precision: str) -> Strategy:
    alone = SingleDevice()
    alone.connect(Layout(), [device], Precision(precision, device.type))
    return alone


def _copied(module: TrainingModule) -> TrainingModule:
    """Copy a module, with the same run; attributes that cannot be copied, as locks, are shared."""
    state = module.trainer_state
    known: dict[int, Any] = {id(state): state}  # neither the run nor weights can be copied
    if not _can_copy(module, dict(known)):
        attributes = [value for owner in module.modules() for value in vars(owner).values()]
        memo = known | {id(submodule): submodule for submodule in module.modules()}
        known |= {id(value): value for value in attributes if not _can_copy(value, dict(memo))}
    try:
        copied = copy.deepcopy(module, known)
    except Exception as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {one_line(error)}"
        problem = f"{type(module).__name__} cannot be copied, to try it on a copy ({reason})"
        advice = "create in on_fit_start what cannot be, or give it a __deepcopy__"
        raise UserError(f"{problem}: {advice}") from None
    copied.trainer_state = state
    return copied


def _can_copy(value: Any, known: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, known)
    except Exception:  # user code may raise anything
        return False
    return True


def find_batch_size(
    module: TrainingModule, loader: object, device: torch.device, precision: str, replicas: int
) -> tuple[int, str]:
    """Find the largest batch on which a device can train, the same on every process.

    Each process tries on its own, on a copy of the module and without collectives: one that runs
    out of memory must not leave its peers waiting. Two steps are tried for each size: the second
    one includes the optimizer state. Also return why none larger was tried: ``replicas`` bound it.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        advice = "give a DataLoader of a data set that can be indexed"
        raise UserError(f"find_batch_size makes batches of many sizes: {advice}")
    samples = len(loader.dataset)  # type: ignore[arg-type]
    largest = max(1, samples // replicas)

    def fits(size: int) -> bool:
        return fits_in_memory(lambda: _try(_alone(device, precision), module, loader, size))

    try:  # not one sample first, which BatchNorm refuses in training
        size = largest_that_fits(fits, 2, largest)
    finally:
        if not module.automatic_optimization:
            module.trainer.manual = None
    if size < largest:
        return size, ""
    of_all = f" for {replicas} replicas" if replicas > 1 else ""
    return size, f"; no larger one was tried: the dataset has {samples} samples{of_all}"


def _try(alone: Strategy, module: TrainingModule, loader: DataLoader[Any], size: int) -> None:
    tried = _copied(module)
    optimization = alone.setup(tried, lambda: configured(tried))
    manual: ManualOptimization | None = None
    if not tried.automatic_optimization:
        tried.trainer.manual = manual = ManualOptimization(alone, optimization)
    if (run := tried.trainer_state.run) is not None:
        run.recorder.enter(BatchContext(samples=size, counted=size))
    batch = loader.collate_fn([loader.dataset[index] for index in range(size)])
    # The prefetched batch, which is also on the GPU.
    waiting = moving.move(batch, alone.device, alone.precision.parameter_dtype)
    for number in range(2):
        if manual is not None:
            manual.run(batch, number)
            continue
        try:
            alone.forward_backward(batch, number, weight=1.0, synchronize=True)
        except BatchSkipped:
            raise UserError(
                "find_batch_size: training_step returned None for the first samples: set batch_size"
            ) from None
        alone.step(optimization)
    del waiting


def largest_that_fits(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """Find the largest batch size that fits on every rank: double it until it fails, then bisect.

    Every rank tries the same sizes; ones that are smaller than the first only if it does not fit.
    ``fits`` tries a size on this rank alone; the least ``start`` and ``limit`` of ranks are used.
    """
    start, limit = _minimum(start, limit)
    fitting, too_large, size = 0, limit + 1, min(start, limit)
    while fitting + 1 < too_large:
        if _minimum(fits(size))[0]:
            fitting = size
        else:
            too_large = size
        size = (fitting + too_large) // 2 if too_large <= limit else min(2 * fitting, limit)
    if fitting == 0:
        raise UserError(
            "find_batch_size: a batch of one sample does not fit into the memory of every device; "
            "use precision='bf16-mixed', or make the model or its samples smaller"
        )
    return fitting


def fits_in_memory(trial: Callable[[], object]) -> bool:
    """Whether a trial, which has no collectives, fits into memory, which is freed afterward.

    If the operating system overcommits memory, as Linux does, running out of it on the CPU kills
    the process instead of raising an error: there, only ``limit`` prevents this.
    """
    fits = True
    try:
        trial()
    except Exception as error:
        fits = False
        if not is_out_of_memory(error):
            raise
    gc.collect()  # after the except block: the traceback keeps the trial's tensors alive
    torch.cuda.empty_cache()
    return fits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host ran out of memory."""
    is_named = any(message in str(error) for message in _MEMORY_MESSAGES)
    is_own_class = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_own_class or (isinstance(error, RuntimeError) and is_named)


def _minimum(*values: int) -> list[int]:
    return list(collectives.all_reduce(torch.tensor(values), "min").tolist())


def rates(lowest: float, highest: float, steps: int) -> list[float]:
    """The learning rates to try, one per step: in equal ratios; ConfigurationError for bad ones."""
    if not 0 < lowest < highest < math.inf:
        problem = f"find_learning_rate: lowest={lowest!r} and highest={highest!r}"
        raise ConfigurationError(f"{problem}: give numbers above 0, the lowest first")
    if steps < 20:
        raise ConfigurationError(f"find_learning_rate: steps={steps!r}: give at least 20")
    return [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]


def problems_of(name: str, strategy: Strategy, module: TrainingModule) -> list[str]:
    """One line for each reason not to try rates on copies of a module that ranks train together."""
    lines = []
    if not module.automatic_optimization:
        why = "with manual optimization, training_step steps the optimizers"
        lines.append(f"find_learning_rate: {why}; set their rates in configure_optimizers")
    if strategy.limits.shards_parameters or "parameter_averaging" in strategy.limits.refused:
        problem = f"strategy={name!r} does not train the same whole model on each rank"
        advice = "use strategy='ddp' with the same effective batch size"
        lines.append(f"find_learning_rate: {problem}; {advice}")
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
    module: TrainingModule, feed: Feed, device: torch.device, options: Options, rates: list[float]
) -> list[Tried]:
    """Make a step at each rate on a copy; ranks average their gradients, as under ``ddp``.

    Return losses over the global batch before each step, of fewer steps if the loss has diverged.
    """
    trained, untrained = (_alone(device, str(options.precision)) for _ in range(2))
    tried = _copied(module)
    optimization = trained.setup(tried, lambda: configured(tried))
    if collectives.world_size() > 1:
        for value in tried.state_dict().values():
            collectives.broadcast_in_place(value)
    untrained.place(_copied(tried))
    _undo_schedules(optimization)
    first = next(iter(optimization.configured_rates()), 0.0)
    if not first > 0:
        raise UserError(
            "find_learning_rate: the first parameter group of configure_optimizers has the rate "
            f"{first}; give one above 0, to which the others are in proportion"
        )
    results: list[Tried] = []
    for rate, batches in zip(rates, _steps(trained, feed), strict=False):
        losses = []
        for batch in batches:
            module.trainer.recorder.enter(BatchContext(batch.samples, batch.counted, batch.weight))
            losses.append(_losses(trained, untrained, batch))
        for p in optimization.parameters if collectives.world_size() > 1 else []:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            p.grad = collectives.all_reduce(gradient.detach(), "mean")
        with optimization.rates_multiplied(rate / first):
            if options.gradient_clip_val is not None:
                algorithm = options.gradient_clip_algorithm
                trained.clip(optimization, options.gradient_clip_val, algorithm)
            trained.step(optimization)
        mean = collectives.all_reduce(torch.stack(losses).sum(0).double(), "mean").tolist()
        results.append(Tried(rate, *mean))
        change = _smoothed([result.change for result in results])[-1]
        if not change < _DIVERGED * results[0].initial:  # also if it is NaN
            break
    return results


def _steps(strategy: Strategy, feed: Feed) -> Iterator[list[MicroBatch]]:
    for epoch in count():
        batches = read(strategy, feed, epoch, 0)
        while step := list(islice(batches, feed.accumulate)):
            yield step


def _losses(trained: Strategy, untrained: Strategy, batch: MicroBatch) -> Tensor:
    """The weighted losses of both, with the same random numbers; accumulates gradients."""
    devices, args = trained.data.devices, (batch.data, batch.number)
    state = randomness.full_state(devices)
    try:
        result = trained.forward_backward(*args, weight=batch.weight, synchronize=True)
    except BatchSkipped:
        problem = f"find_learning_rate: training_step returned None for batch {batch.number}"
        raise UserError(f"{problem}: leave such batches out of the data") from None
    randomness.set_full_state(state, devices)
    with torch.no_grad():
        initial = read_loss(untrained.forward("training", *args))
    losses = (*result.losses, initial)
    return torch.stack([loss.detach().reshape(()) for loss in losses]) * batch.weight


def _smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average, corrected for its start."""
    parts = [(1 - _SMOOTHING) * value for value in values]
    means = accumulate(parts, lambda mean, part: _SMOOTHING * mean + part)
    return [mean / (1 - _SMOOTHING**number) for number, mean in enumerate(means, 1)]


def suggest(tried: Sequence[Tried]) -> float:
    """The rate at which the loss falls most steeply, over the logarithm of rates."""
    falls = [before - after for before, after in pairwise(_smoothed([t.change for t in tried]))]
    steepest = max(range(len(falls)), key=falls.__getitem__, default=None)
    if steepest is None or not falls[steepest] > _LEAST * abs(tried[0].initial):
        where = f"any rate from {tried[0].rate:g} to {tried[-1].rate:g}"
        advice = "give another lowest and highest, or more steps"
        raise UserError(f"find_learning_rate: the loss does not fall at {where}; {advice}")
    return tried[steepest].rate


def _undo_schedules(optimization: Optimization) -> None:
    """Undo what schedulers have done to the optimizers when they were created."""
    for optimizer in optimization.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
            if "max_momentum" in group:  # of OneCycleLR and CyclicLR
                kept = {"momentum", "betas"} & optimizer.defaults.keys()
                group.update({name: optimizer.defaults[name] for name in kept})
