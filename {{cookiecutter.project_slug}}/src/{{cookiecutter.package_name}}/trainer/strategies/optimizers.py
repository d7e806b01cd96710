"""What ``configure_optimizers`` may return, in one form; and optimizer state by parameter name."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigurationError, UserError

_SCHEDULERS = __name__.replace(".", r"\.")
# Of a group of torch's optimizers: which code computes the same.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass
class Schedule:
    """A scheduler and when it is stepped."""

    scheduler: LRScheduler | ReduceLROnPlateau
    interval: Literal["step", "epoch"] = "epoch"
    monitor: str | None = None

    def step(self, values: Mapping[str, float]) -> None:
        """Step once; ``values`` are the newest logged ones.

        Raises:
            UserError: the monitored value was not logged.
        """
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            with _without_reminder(self.scheduler):
                self.scheduler.step()
        elif self.monitor is not None and self.monitor in values:
            self.scheduler.step(values[self.monitor])
        else:
            raise UserError(
                f"ReduceLROnPlateau monitors {self.monitor!r}, which was not logged; "
                f"logged: {', '.join(sorted(values)) or 'nothing'}"
            )


@contextlib.contextmanager
def _without_reminder(scheduler: LRScheduler) -> Iterator[None]:
    """torch reminds of the order of steps, once, where an engine or a scaler steps in its stead."""
    if scheduler._step_count > 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Seems like|Detected call)", module=_SCHEDULERS)
        yield


@dataclass
class Optimization:
    """All optimizers of a run and their schedules."""

    optimizers: list[Optimizer]
    schedules: list[Schedule]

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizers step, each once."""
        seen: dict[int, Tensor] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                seen.update((id(parameter), parameter) for parameter in group["params"])
        return list(seen.values())

    def replaced(self, make: Callable[[Optimizer], Optimizer]) -> "Optimization":
        """The same with an engine's optimizers in the place of the user's."""
        made = {id(optimizer): make(optimizer) for optimizer in self.optimizers}
        for entry in self.schedules:
            _point(entry.scheduler, made)
        return Optimization([made[id(each)] for each in self.optimizers], self.schedules)

    def step_schedules(
        self, interval: Literal["step", "epoch"], values: Mapping[str, float]
    ) -> None:
        """Step the schedules of an interval; ``values`` are the newest logged ones."""
        for entry in self.schedules:
            if entry.interval == interval:
                entry.step(values)

    def learning_rates(self, factor: float) -> dict[str, float]:
        """What is logged of the learning rates, times a factor of which schedulers do not know."""
        rates = [float(each.param_groups[0]["lr"] * factor) for each in self.optimizers]
        if len(rates) == 1:
            return {"lr": rates[0]}
        return {f"lr-{index}": rate for index, rate in enumerate(rates)}

    def configured_rates(self) -> list[float]:
        """The learning rate of each parameter group, before a scheduler changes it."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        return [float(group.get("initial_lr", group["lr"])) for group in groups]

    def other_rates(self, configured: Sequence[float]) -> list[str]:
        """One line if the rates are others than those that were configured."""
        loaded = self.configured_rates()
        if loaded == list(configured):
            return []
        ours, theirs = (", ".join(f"{rate:g}" for rate in each) for each in (configured, loaded))
        return [
            f"the learning rate is the checkpoint's, {theirs}, and not the configured {ours}: a "
            "resume restores the optimizer's state; start a new run to train at another rate"
        ]

    @contextlib.contextmanager
    def rates_multiplied(self, factor: float) -> Iterator[None]:
        """Step at other learning rates, of which the schedulers know nothing."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        with _multiplied(groups, factor):
            yield


@contextlib.contextmanager
def _multiplied(groups: Sequence[dict[str, Any]], factor: float) -> Iterator[None]:
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _point(scheduler: Any, optimizers: Mapping[int, Optimizer]) -> None:
    """Have a scheduler, and those inside it, write to other optimizers."""
    if id(scheduler.optimizer) in optimizers:
        scheduler.optimizer = optimizers[id(scheduler.optimizer)]
    for inner in getattr(scheduler, "_schedulers", ()):
        _point(inner, optimizers)


def read_optimization(returned: Any) -> Optimization:
    """One form from all that ``configure_optimizers`` may return.

    Raises:
        ConfigurationError: it returned something else; the line says what.
    """
    if isinstance(returned, Optimizer):
        return Optimization([returned], [])
    if isinstance(returned, Mapping):
        returned = [returned]
    if isinstance(returned, Sequence) and returned:
        if all(isinstance(each, Optimizer) for each in returned):
            return Optimization(list(returned), [])
        if all(isinstance(each, Mapping) for each in returned):
            unknown = {key for each in returned for key in each} - {"optimizer", "lr_scheduler"}
            if unknown:
                names = ", ".join(sorted(map(repr, unknown)))
                raise ConfigurationError(
                    f"configure_optimizers gave {names}; use 'optimizer' and 'lr_scheduler'"
                )
            schedulers = [each["lr_scheduler"] for each in returned if "lr_scheduler" in each]
            return _pair([each.get("optimizer") for each in returned], schedulers)
        if len(returned) == 2 and all(isinstance(each, Sequence) for each in returned):
            return _pair(*returned)
    raise ConfigurationError(
        f"configure_optimizers returned {type(returned).__name__}; return an optimizer, a list of "
        "optimizers, ([optimizers], [schedulers]), or dicts with 'optimizer' and 'lr_scheduler'"
    )


def _pair(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Optimization:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"configure_optimizers gave {type(optimizer).__name__} where an optimizer belongs"
            )
    return Optimization(list(optimizers), [_read_schedule(each) for each in schedulers])


def _read_schedule(entry: Any) -> Schedule:
    fields = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    unknown = fields.keys() - {"scheduler", "interval", "monitor"}
    scheduler = fields.get("scheduler")
    if unknown or not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        raise ConfigurationError(
            f"lr_scheduler {entry!r}: give a scheduler, or a dict of 'scheduler', 'interval' and "
            "'monitor'"
        )
    schedule = Schedule(**fields)
    if schedule.interval not in ("step", "epoch"):
        raise ConfigurationError(
            f"lr_scheduler interval={schedule.interval!r}: use 'step' or 'epoch'"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and schedule.monitor is None:
        raise ConfigurationError("ReduceLROnPlateau needs 'monitor': the name of a logged value")
    return schedule


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state keyed by parameter names, which mean the same under every strategy.

    Args:
        optimizer: any torch optimizer.
        names: parameter names by ``id`` of the parameter.
    """
    by_index = _names_by_index(optimizer, names)
    state = optimizer.state_dict()
    return {
        "state": {by_index[index]: dict(values) for index, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [by_index[index] for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def load_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Put back what :func:`optimizer_state` gave.

    Raises:
        ConfigurationError: the saved parameters are not those of this optimizer.
    """
    by_index = _names_by_index(optimizer, names)
    indices = {name: index for index, name in by_index.items()}
    saved = {name for group in state["param_groups"] for name in group["params"]}
    if saved != indices.keys():
        strange = ", ".join(sorted(saved ^ indices.keys())[:3])
        raise ConfigurationError(
            f"the checkpoint's optimizer holds other parameters than this one ({strange})"
        )
    groups = []
    first = 0
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        own_indices = list(range(first, first + len(own["params"])))
        first += len(own_indices)
        if {by_index[index] for index in own_indices} != set(group["params"]):
            raise ConfigurationError("the checkpoint's optimizer groups its parameters otherwise")
        # torch matches by position: so the order must be this optimizer's own.
        groups.append({**group, **implementation(own), "params": own_indices})
    by_own_index = {indices[name]: dict(values) for name, values in state["state"].items()}
    optimizer.load_state_dict({"state": by_own_index, "param_groups": groups})


def implementation(group: Mapping[str, Any]) -> dict[str, Any]:
    """How an optimizer computes a group, which is this run's affair and not a checkpoint's."""
    return {name: group[name] for name in _IMPLEMENTATION if name in group}


def place_step(group: Mapping[str, Any], values: dict[str, Any], device: torch.device) -> None:
    """Put the number of steps where torch's optimizers expect it, as ``load_state_dict`` does.

    Args:
        group: of the parameter.
        values: of its state, which an engine keeps elsewhere than torch.
        device: of the parameter.
    """
    if (group.get("fused") or group.get("capturable")) and isinstance(values.get("step"), Tensor):
        values["step"] = values["step"].to(device, torch.float32)


def _names_by_index(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    parameters: Iterable[Tensor] = (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )
    # A parameter that the module does not own still has a place in the optimizer: its index.
    return {
        index: names.get(id(parameter), f"#{index}") for index, parameter in enumerate(parameters)
    }


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Parameter names of a module by ``id`` of the parameter."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def clip_gradients(parameters: Sequence[Tensor], value: float, algorithm: str) -> None:
    """Clip full gradients in place: their global norm, or each value."""
    parameters = [_with_dense_gradient(each) for each in parameters]
    if algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, value)
    else:
        torch.nn.utils.clip_grad_value_(parameters, value)


def _with_dense_gradient(parameter: Tensor) -> Tensor:
    """A tensor whose gradient is the values of a parameter's sparse one, for what takes no such."""
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    # A row may occur several times; its norm is that of their sum.
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad.detach().values()
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    return stand_in
