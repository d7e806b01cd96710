"""Record logged values: accumulate sums on the device, reduce them only when they are shown."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError, nearest, shown
from ..launch import collectives, output
from ..launch.collectives import How

ReduceFx = Literal["mean", "sum", "min", "max"]
Level = Literal["step", "epoch", "none"]
STEPS = "steps:"  # in a state, before the names of totals of steps
_REDUCE_FX: tuple[ReduceFx, ...] = ("mean", "sum", "min", "max")


class BatchContext(NamedTuple):
    """Properties of a batch on which its step and logged values depend.

    The loop creates one for each batch, and for hooks between them; the defaults apply elsewhere.
    """

    samples: int = 1  # of this rank, that count; 0 for a padding batch
    counted: float = 1.0  # what they count in logged means
    weight: float = 1.0  # factor of the mean loss over the samples
    ends_step: bool = True  # the optimizers step after it; gradients are synchronized for that
    ends_epoch: bool = False
    is_even: bool = True  # every replica has such a batch, as far as is known
    is_recorded: bool = False  # the values of its step are written
    is_training: bool = True
    level: Level = "step"  # what a logged value is of: a step; around steps the epoch; or nothing
    rate_factor: float = 1.0  # of the learning rates in its step
    loader: str = ""  # name of its loader, if the loaders of an evaluation have names


@dataclass
class _Total:
    """A running reduction of a value, on the device, in double precision."""

    how: ReduceFx
    synced: bool
    total: Tensor
    weight: float

    def add(self, value: Tensor, samples: float | None) -> None:
        if samples is None or (self.how == "mean" and not samples):
            return  # the mean over nothing may be NaN
        if self.how == "mean":
            self.total.add_(value, alpha=samples)  # one kernel
            self.weight += samples
        elif self.how == "sum":
            self.total.add_(value)
        else:
            self.total = (torch.minimum if self.how == "min" else torch.maximum)(self.total, value)


def _empty_total(how: ReduceFx, synced: bool, device: torch.device) -> _Total:
    start = {"min": math.inf, "max": -math.inf}.get(how, 0.0)
    return _Total(how, synced, _number(start, device), 0.0)


def _number(value: Any, device: torch.device) -> Tensor:
    """Convert a value to a tensor on the device; the host does not wait for the device."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, Tensor) and value.device == device:
        return value
    if device.type == "cpu" or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return torch.as_tensor(value, dtype=torch.float64, device=device)
    if (number := torch.as_tensor(value, dtype=torch.float64)).numel() != 1:
        return number
    # full() launches a kernel: a copy from the host would wait for all pending work.
    return torch.full((), number.item(), dtype=torch.float64, device=device)


class _Logged(NamedTuple):
    name: str
    value: Any
    samples: float | None  # ``None``: it counts in no reduction, as of a padding batch
    how: ReduceFx
    synced: bool
    version: int = -1  # of a value that is no copy: not shown if changed since (``loss += 1``)


class Recorder:
    """Records the values that a module logs, on the device, until they are shown.

    Without ``steps_together``, values of a step are not reduced: other ranks may be at another one.
    Unless it ``counts``, no value of this rank does.
    """

    def __init__(
        self,
        reduce: Callable[[Tensor, How], Tensor],
        device: torch.device,
        steps_together: bool = True,
        counts: bool = True,
    ) -> None:
        self.context = BatchContext(level="epoch")  # of a step's batch, or of hooks between
        self.latest: dict[str, Any] = {}
        self._reduce, self._device = reduce, device
        self._steps_together, self._counts = steps_together, counts
        self._step: dict[str, _Total] = {}
        self._late: list[_Logged] = []
        self._epoch: dict[str, _Total] = {}
        self._steps: dict[str, _Total] = {}  # of the epoch too: values logged without ``on_epoch``
        self.of_training: set[str] = set()  # names of its values
        self.metrics: dict[str, Any] = {}  # the objects logged since they were last computed
        self._checked: set[str] = set()  # names of metric objects that are known to compute numbers
        self._of_training: dict[int, str] = {}  # names of training's by ``id``, in an evaluation
        self._derived: dict[str, str] = {}  # names of values of steps and epochs: of which value
        self.may_lack_names = not counts  # it may log less than others, as without a batch

    def enter(self, context: BatchContext) -> None:
        """Record values in a context from now on; those of an earlier step are dropped."""
        if self.context.ends_step and context.level == "step":
            self._late.clear()
        self.context = context

    def log(
        self,
        name: str,
        value: Any,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        sync_dist: bool = True,
        reduce_fx: ReduceFx = "mean",
        batch_size: float | None = None,
    ) -> None:
        """See :meth:`~..module.TrainingModule.log`; the batch's loader is added to the name."""
        context = self.context
        name = f"{name}/{context.loader}" if context.loader else name
        if name in self._derived:
            raise UserError(_taken(name, self._derived[name]))
        count = context.counted if batch_size is None else batch_size
        samples = count if context.samples and self._counts else None
        if isinstance(value, Tensor):
            is_quick = not context.is_recorded and context.is_training and context.level == "step"
            if is_quick and not (on_epoch or prog_bar or on_step is False):
                # The step's value will not be shown, unless training ends with this step.
                # A copy if it may be changed in place, as buffers and parameters are, and no loss.
                is_computed = value.requires_grad and not value.is_leaf
                kept = value.detach() if is_computed else value.detach().clone()
                version = kept._version if is_computed else -1
                logged = _Logged(name, kept, samples, reduce_fx, sync_dist, version)
                self._late.append(logged)
                if on_epoch is None:
                    self._add(self._steps, logged)
                return
            value = value.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor
        elif hasattr(value, "compute") and hasattr(value, "reset"):
            if on_step or on_epoch is False or reduce_fx != "mean":
                raise UserError(
                    f"log({name!r}): a metric is logged once per epoch: leave out on_step, "
                    "on_epoch and reduce_fx; to log values of steps, log what calling it returns"
                )
            self._log_metric(name, value)
            return
        if prog_bar:
            self.latest[name] = value
        is_default = on_epoch is None
        if on_step and not context.is_training and collectives.rank() == 0:
            output.print_once("note: log(on_step=True): evaluations write no values of steps")
        on_step, on_epoch = _levels(name, context, on_step, on_epoch, prog_bar)
        if on_step and on_epoch:
            self._derived[f"{name}_step"] = self._derived[f"{name}_epoch"] = name
        if on_step:
            key = f"{name}_step" if on_epoch else name
            logged = _Logged(key, value, samples, reduce_fx, sync_dist)
            if context.is_recorded:
                self._add(self._step, logged)
            else:
                kept = value.clone() if isinstance(value, Tensor) else value
                self._late.append(logged._replace(value=kept))
            if is_default:
                self._add(self._steps, logged)
        if on_epoch:
            key = f"{name}_epoch" if on_step else name
            self._add(self._epoch, _Logged(key, value, samples, reduce_fx, sync_dist))

    def _log_metric(self, name: str, metric: Any) -> None:
        if id(metric) in self._of_training and not hasattr(metric, "metric_state"):
            of_training = self._of_training[id(metric)]
            raise UserError(
                f"log({name!r}): the same {type(metric).__name__} is logged in training, as "
                f"{of_training!r}, whose values it would mix in: create one for each stage"
            )
        self.metrics[name] = metric
        if name not in self._checked:
            self._checked.add(name)
            _number_of(name, metric, _first_value(metric))

    def _add(self, totals: dict[str, _Total], logged: _Logged) -> None:
        name, value, samples, how, synced, _ = logged
        if name in totals:
            before = totals[name].how, totals[name].synced
            if before != (getattr(how, "__name__", how), synced):
                what = "another reduce_fx or sync_dist than before"
                raise UserError(f"log({name!r}): {what}: give the same, or another name")
        else:
            if not name.strip():
                raise UserError(f"log({name!r}): give the value a name")
            how = getattr(how, "__name__", how)  # of torch.mean, sum …
            if how not in _REDUCE_FX:
                known = nearest(str(how), _REDUCE_FX)
                raise UserError(f"log({name!r}): reduce_fx={how!r} is unknown{known}")
            other = totals.keys() & {name.removesuffix("_epoch"), f"{name}_epoch"}
            if other and totals is self._steps:
                raise UserError(_taken(*sorted([name, *other], key=len, reverse=True)))
            totals[name] = _empty_total(how, synced, self._device)
            if self.context.is_training:
                self.of_training.add(name)
        try:
            number = _number(value, self._device)
            if number.numel() == 1:
                return totals[name].add(number.reshape(()) if number.ndim else number, samples)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UserError(f"log({name!r}): give one number, not {shown(value)}") from None
        shape = tuple(number.shape)
        raise UserError(f"log({name!r}): give one number, not a tensor of shape {shape}")

    @property
    def names(self) -> list[str]:
        """Of the values that are not reduced yet."""
        return [*self._step, *self._epoch, *self.metrics]

    def take_step(self) -> dict[str, float]:
        """Values of the step, reduced over micro-batches and ranks."""
        totals, self._step = self._step, {}
        for logged in self._late:
            if logged.version in (-1, getattr(logged.value, "_version", -1)):
                self._add(totals, logged)
        self._late.clear()
        return self._reduced(totals) if self._steps_together else _values(totals)

    def epoch_values(self) -> dict[str, float]:
        """Values of the epoch so far, reduced over samples and ranks."""
        values: dict[str, float] = {}
        if self.context.is_training:
            of_epoch = {f"{name}_epoch": total for name, total in self._steps.items()}
            values = self._reduced(of_epoch, may_differ=True)
        waiting = [name for name, m in self.metrics.items() if getattr(m, "sync_on_compute", False)]
        values |= self._reduced(self._epoch, metrics=waiting)
        return values | {name: _number_of(name, m, m.compute()) for name, m in self.metrics.items()}

    def take_epoch(self) -> dict[str, float]:
        """Take the values of the epoch; metrics are reset."""
        values = self.epoch_values()
        for metric in self.metrics.values():  # one may have several names
            metric.reset()
        self._steps, self._epoch, self.metrics = {}, {}, {}
        return values

    def _reduced(
        self, totals: dict[str, _Total], may_differ: bool = False, metrics: Iterable[str] = ()
    ) -> dict[str, float]:
        """Reduce totals; ``may_differ``: ranks may have logged other names, or in another order.

        ``metrics``: names of the metric objects that will wait for those of the other ranks.
        """
        synced = {name: total for name, total in totals.items() if total.synced}
        local = {name: total for name, total in totals.items() if not total.synced}
        return _values(self._agreed(synced, may_differ, metrics), self._reduce) | _values(local)

    def _agreed(
        self, totals: dict[str, _Total], may_differ: bool, metrics: Iterable[str]
    ) -> dict[str, _Total]:
        """Use the same names in the same order on every rank."""
        if collectives.world_size() == 1:
            return totals
        names = [f"{total.how} {name}" for name, total in totals.items()]
        names += [f"metric {name}" for name in metrics]
        number = int(hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest(), 16)
        pair = torch.tensor([number, -number], dtype=torch.float64, device=self._device)
        most, least = self._reduce(pair, "max").tolist()
        if most == -least:
            return totals
        known = collectives.gather([not self.may_lack_names, names])
        if may_differ:
            known = [[True, sorted({name for _, of_rank in known for name in of_rank})]]
        has_all, main = max(known, key=lambda item: (item[0], len(item[1])))
        is_off = names != main
        if self.may_lack_names:  # but no metric object, which waits for those of all ranks
            differing = {*names} ^ {*main}
            is_off = any(name in names or name.startswith("metric ") for name in differing)
        if is_off and not may_differ:
            here, there = (
                ", ".join(name.partition(" ")[2] for name in of_rank) or "nothing"
                for of_rank in (names, main)
            )
            first = known.index([has_all, main])
            raise UserError(
                f"rank {collectives.rank()} logged {here} and rank {first} {there}: "
                "log the same names in the same order on every process, or with sync_dist=False"
            )
        pairs = [name.split(" ", 1) for name in main if not name.startswith("metric ")]
        empty = {name: _empty_total(how, True, self._device) for how, name in pairs}
        kept = {name: total for name, total in totals.items() if total.how == empty[name].how}
        return empty | kept

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Record values of validation or test in this context; training's values are kept apart."""
        kept = self.context, self._epoch, self._steps, self.metrics, self.latest
        may_lack_names = self.may_lack_names
        self._of_training = {id(metric): name for name, metric in self.metrics.items()}
        self.context = self.context._replace(is_training=False, level="step")
        self._epoch, self._steps, self.metrics, self.latest = {}, {}, {}, {}
        try:
            yield
        finally:
            self.context, self._epoch, self._steps, self.metrics, self.latest = kept
            self._of_training, self.may_lack_names = {}, may_lack_names

    def state(self) -> dict[str, Tensor]:
        """This rank's sums of the current epoch."""
        return {
            f"{start}{total.how}:{int(total.synced)}:{name}": torch.stack(
                [total.total.cpu(), torch.tensor(total.weight, dtype=torch.float64)]
            )
            for start, totals in (("", self._epoch), (STEPS, self._steps))
            for name, total in totals.items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for key, (total, weight) in state.items():
            how, synced, name = key.removeprefix(STEPS).split(":", 2)
            totals = self._steps if key.startswith(STEPS) else self._epoch
            moved = total.to(self._device)
            totals[name] = _Total(how, synced == "1", moved, float(weight))  # type: ignore[arg-type]


def _first_value(metric: Any) -> Any:
    """What a metric computes of this rank's first batch, or 0; not kept, and not exchanged."""
    inner = list(metric.children()) if isinstance(metric, nn.Module) else []
    is_small = all(hasattr(child, "compute") for child in inner)  # no network
    if is_small and not (inner and collectives.world_size() > 1):
        with contextlib.suppress(Exception):  # it may need more samples
            return type(metric).compute(metric)
    return 0.0


def _number_of(name: str, metric: Any, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        kind = type(value).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        raise UserError(
            f"log({name!r}): {type(metric).__name__} computes {kind}, not one number: log numbers "
            "of its compute() in on_train_epoch_end or on_validation_epoch_end, and reset it there"
        ) from None


def _taken(name: str, of: str) -> str:
    return f"log({name!r}): log({of!r}) writes values of this name, too: use another"


def _levels(
    name: str, context: BatchContext, on_step: bool | None, on_epoch: bool | None, prog_bar: bool
) -> tuple[bool, bool]:
    """Whether to log a value of the step, and of the epoch; UserError if it is neither."""
    if context.level == "none":
        advice = "log in on_train_epoch_end, in on_validation_epoch_end, or in a step"
        raise UserError(f"log({name!r}): nothing is logged in this hook; {advice}")
    if context.is_training and context.level == "epoch" and on_step:
        raise UserError(f"log({name!r}, on_step=True): this hook belongs to no step; leave it out")
    is_step = context.is_training and context.level == "step"
    on_step = is_step and on_step is not False
    on_epoch = bool(on_epoch) if is_step else on_epoch is not False
    if not (on_step or on_epoch or prog_bar):
        option = "on_step=False without on_epoch=True" if is_step else "on_epoch=False"
        raise UserError(f"log({name!r}): with {option}, the value would not be logged")
    return on_step, on_epoch


def _values(
    totals: Mapping[str, _Total], reduce: Callable[[Tensor, How], Tensor] = lambda tensor, _: tensor
) -> dict[str, float]:
    """Compute all totals, with one reduction for sums and one for minima and maxima."""
    sums = [name for name, total in totals.items() if total.how in ("mean", "sum")]
    extremes = [name for name in totals if name not in sums]
    result: dict[str, float] = {}
    if sums:
        values = torch.stack([totals[name].total for name in sums])
        weights = torch.tensor([totals[name].weight for name in sums], dtype=torch.float64)
        reduced = reduce(torch.stack([values, weights.to(values.device)]), "sum").tolist()
        for name, total, weight in zip(sums, *reduced, strict=True):
            mean = total / weight if weight else math.nan
            result[name] = mean if totals[name].how == "mean" else total
    if extremes:
        signs = [-1.0 if totals[name].how == "min" else 1.0 for name in extremes]
        signed = [sign * totals[name].total for sign, name in zip(signs, extremes, strict=True)]
        largest = reduce(torch.stack(signed), "max").tolist()
        for name, sign, value in zip(extremes, signs, largest, strict=True):
            result[name] = sign * value
    return {name: result[name] for name in totals}
