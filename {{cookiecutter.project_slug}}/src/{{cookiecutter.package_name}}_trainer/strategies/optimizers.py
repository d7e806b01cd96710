"""Normalize the result of ``configure_optimizers``."""

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import ConfigurationError, UserError, instead, one_line, refuse, shown
from ..launch import collectives, output
from ..module import TrainingModule
from .optimizer_state import IMPLEMENTATION

_NOT_COMPARED = {"params", "initial_lr", *IMPLEMENTATION}
# Modules that step schedulers: the trainer's, and torch's, for schedulers inside schedulers.
_STEPPING = rf"{__name__.partition('.')[0]}\.|torch\.optim\.lr_scheduler"
_STEPS = {"total_steps", "estimated_stepping_batches"}
_UNKNOWN = (
    "self.trainer.total_steps is None, because it is not known: give max_steps; or max_epochs, if "
    "the training loader has a length"
)
UNREACHED = (
    "the loss of training_step depends on no parameter of the optimizers: compute it from the "
    "module's own parameters"
)


@dataclass
class SchedulerConfig:
    scheduler: LRScheduler | ReduceLROnPlateau
    interval: Literal["step", "epoch"] = "epoch"
    monitor: str | None = None
    last_step: int | None = field(default=None, init=False)
    """Its ``last_epoch`` after the last step of the trainer."""

    def step(self, values: Mapping[str, float]) -> None:
        """Step once; ``values`` are those that were computed since: without its own, it waits."""
        steps = getattr(self.scheduler, "last_epoch", None)  # ChainedScheduler has none
        if self.last_step not in (None, steps) and collectives.rank() == 0:
            output.print_once(
                f"note: {type(self.scheduler).__name__} was stepped by user code, and is stepped "
                f"by the trainer at each {self.interval}'s end, too: leave out one of them"
            )
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            try:
                self.scheduler.step()
            except ValueError as error:  # OneCycleLR's, which has an end
                raise UserError(f"{type(self.scheduler).__name__}: {one_line(error)}") from None
        elif self.monitor is not None and self.monitor in values:
            self.scheduler.step(values[self.monitor])
        self.last_step = getattr(self.scheduler, "last_epoch", None)


@dataclass
class Optimization:
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]

    @property
    def parameters(self) -> list[Tensor]:
        """All optimized parameters, each once."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return list({id(p): p for group in groups for p in group["params"]}.values())

    def replaced(self, make: Callable[[Optimizer], Optimizer]) -> "Optimization":
        """A copy with an engine's optimizers instead of the user's."""
        from .engine_optimizers import problems_of_code

        refuse(problems_of_code(self.optimizers))
        return Optimization([make(optimizer) for optimizer in self.optimizers], self.schedulers)

    def step_schedulers(self, interval: Literal["step", "epoch"], new: Mapping[str, float]) -> None:
        """Step the schedulers of an interval; ``new``: values computed since they last stepped."""
        for entry in self.schedulers:
            if entry.interval == interval:
                entry.step(new)

    @property
    def plateaus(self) -> list[SchedulerConfig]:
        """The schedulers that act on a logged value."""
        return [item for item in self.schedulers if isinstance(item.scheduler, ReduceLROnPlateau)]

    def stepped_when_logged(self, every: int) -> list[str]:
        """One line for each scheduler that steps only when training logs a value."""
        line = "ReduceLROnPlateau steps when {!r} is logged: log_every_n_steps={}"
        entries = [entry for entry in self.plateaus if entry.interval == "step" and every > 1]
        return [line.format(entry.monitor, every) for entry in entries]

    def step_plateaus(self, values: Mapping[str, float]) -> None:
        """Step by values of a validation those that would see them only after the next step."""
        for entry in self.plateaus:
            if entry.interval == "step":
                entry.step(values)

    def check_monitored(self, values: Mapping[str, float]) -> None:
        """Raise a UserError if a scheduler monitors none of the latest logged values."""
        for entry in self.plateaus:
            if entry.monitor not in values:
                problem = f"ReduceLROnPlateau monitors {entry.monitor!r}, which was not logged"
                raise UserError(f"{problem}; logged: {', '.join(sorted(values)) or 'nothing'}")

    def first_rates(self) -> list[float | Tensor | None]:
        """Rate of each optimizer's first group, if it has one; the host waits for no tensor."""
        rates = (optimizer.param_groups[0]["lr"] for optimizer in self.optimizers)
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def configured_rates(self) -> list[float]:
        """The learning rate of each parameter group, before a scheduler changes it."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = [group.get("initial_lr", group["lr"]) for group in groups]
        return [float(rate) for rate in rates if rate is not None]

    def too_short(self, steps: int | None) -> list[str]:
        """One line for each schedule that ends before a fit of these optimizer steps."""
        return [
            f"OneCycleLR ends after total_steps={config.scheduler.total_steps}, and this fit makes "
            f"{steps} steps: give it self.trainer.total_steps; in a resume, with "
            "resume_options='code'"
            for config in self.schedulers
            if isinstance(config.scheduler, OneCycleLR) and config.interval == "step"
            if steps is not None and steps > config.scheduler.total_steps
        ]

    @contextlib.contextmanager
    def rates_multiplied(self, factor: float) -> Iterator[None]:
        """Multiply the learning rates in this context; schedulers do not see it."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            if rate is None:
                line = "an optimizer computes its learning rate, which cannot be scaled: give it lr"
                raise UserError(line)
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def rates_to_log(rates: Sequence[float | Tensor | None], factor: float) -> dict[str, float]:
    """Learning rates by name, times a factor that schedulers do not see."""
    names = ["lr"] if len(rates) == 1 else [f"lr-{index}" for index in range(len(rates))]
    named = zip(names, rates, strict=True)
    return {name: float(rate * factor) for name, rate in named if rate is not None}


def described(optimization: Optimization) -> dict[str, Any]:
    """Options of each optimizer and constants of each scheduler, by the name that is shown."""
    options: dict[str, Any] = {}
    for index, optimizer in enumerate(optimization.optimizers):
        options[f"optimizer {index}"] = type(optimizer).__name__
        groups = optimizer.param_groups
        groups = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in groups]
        for key in sorted(groups[0].keys() - _NOT_COMPARED):
            values = [_plain(group.get(key)) for group in groups]
            is_one = all(value == values[0] for value in values)
            options[f"{key} of optimizer {index}"] = values[0] if is_one else values
    for index, entry in enumerate(optimization.schedulers):
        options.update(_constants(entry.scheduler, f"scheduler {index}"))
    return options


def _constants(scheduler: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, type(scheduler).__name__
    for key, value in scheduler.state_dict().items():
        if key == "_milestones" or not (key.startswith("_") or key == "base_lrs"):
            yield f"{key} of {name}", _plain(value)
    for index, inner in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from _constants(inner, f"{name}.{index}")


def _plain(value: Any) -> Any:
    """A value that a checkpoint can contain, and that can be compared."""
    has_all = hasattr(value, "tolist") and not hasattr(value, "full_tensor")  # no DTensor
    value = value.tolist() if has_all else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def replace_kept(module: TrainingModule, replaced: Mapping[int, Any]) -> None:
    """Replace objects, by their ids, in attributes of modules and in containers that these are."""

    def is_replaced(item: Any) -> bool:
        return id(item) in replaced

    for owner in module.modules() if replaced else ():
        for name, value in list(vars(owner).items()):
            if any(map(is_replaced, tree_leaves(value, is_leaf=is_replaced))):
                vars(owner)[name] = tree_map(
                    lambda item: replaced.get(id(item), item), value, is_leaf=is_replaced
                )


def configured(module: TrainingModule) -> Optimization:
    """What ``configure_optimizers`` of a module returns; refused if it would not train it."""
    run = module.trainer_state.run
    is_unknown = run is not None and run.total_steps is None
    before = {id(parameter) for parameter in module.parameters()}
    try:
        optimization = read_optimization(module.configure_optimizers())
    except (TypeError, ValueError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if is_unknown and any(_STEPS & {*frame.f_code.co_names} for frame in frames):
            what = f"{type(error).__name__}: {one_line(error)}"
            raise ConfigurationError(f"configure_optimizers: {what}; {_UNKNOWN}") from None
        raise
    schedulers = [scheduler.scheduler for scheduler in optimization.schedulers]
    for item in schedulers if is_unknown else ():
        if None in (getattr(item, name, 0) for name in ("T_max", "total_iters")):
            raise ConfigurationError(f"{type(item).__name__} has no number of steps: {_UNKNOWN}")
    if run is not None:
        run.optimizers, run.schedulers = optimization.optimizers, schedulers
    made = [name for name, parameter in module.named_parameters() if id(parameter) not in before]
    lines = [f"creates {name}, which no strategy knows: do so in __init__" for name in made]
    if lines := lines + _without_effect(optimization, module):
        raise ConfigurationError([f"configure_optimizers: {line}" for line in lines])
    return optimization


def read_optimization(returned: Any) -> Optimization:
    """Normalize the result of ``configure_optimizers``; refuse steps that need an argument."""
    # torch's warning about the order of optimizer and scheduler steps is wrong where another
    # optimizer has replaced the scheduler's, and where a gradient scaler skips the first step.
    warnings.filterwarnings("ignore", "Seems like `optimizer.step")
    warnings.filterwarnings("ignore", "Detected call", module=_STEPPING)
    optimization = _read(returned)
    for opt in optimization.optimizers:
        arguments = list(inspect.signature(type(opt).step).parameters.values())[1:]
        required = [item for item in arguments if item.default is item.empty]
        if needed := [item.name for item in required if item.kind.name[:3] != "VAR"]:
            needs = f"configure_optimizers gave {type(opt).__name__}, whose step needs"
            why = f"{', '.join(needed)}, and is called without arguments: give them defaults"
            if "closure" in needed:
                why = (
                    "a closure: it computes the loss several times per step, which is not "
                    "supported; use another optimizer, such as torch.optim.AdamW"
                )
            raise ConfigurationError(f"{needs} {why}")
        if {"state", "param_groups"} - opt.state_dict().keys():
            raise ConfigurationError(
                f"configure_optimizers gave {type(opt).__name__}, whose state_dict has no 'state' "
                "and 'param_groups', so that no checkpoint can hold it: keep its tensors by "
                "parameter in self.state, as torch's optimizers do"
            )
    return optimization


def _without_effect(optimization: Optimization, module: TrainingModule) -> list[str]:
    """One line for each optimizer or scheduler that does not do what it seems to."""
    known, lines = {id(parameter) for parameter in module.parameters()}, []
    stepped: dict[int, int] = {}
    for index, optimizer in enumerate(optimization.optimizers):
        name = f"optimizer {index} ({type(optimizer).__name__})"
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if foreign := [parameter for parameter in params if id(parameter) not in known]:
            lines.append(
                f"{name} has a parameter of shape {tuple(foreign[0].shape)} that is not one of "
                f"{type(module).__name__}, and is neither moved nor saved: make it an attribute"
            )
        others = {stepped.get(id(parameter)) for parameter in params} - {None}
        if others and module.automatic_optimization:
            lines.append(
                f"{name} has parameters of optimizer {others.pop()} too, and both would step them: "
                "give each parameter to one optimizer, or use manual optimization"
            )
        stepped |= {id(parameter): index for parameter in params}
    groups = {id(group) for opt in optimization.optimizers for group in opt.param_groups}
    lines += [
        f"{type(item.scheduler).__name__} is of an optimizer that is not returned, and changes no "
        "rate: return both"
        for item in optimization.schedulers
        if not {id(group) for group in item.scheduler.optimizer.param_groups} <= groups
    ]
    return lines


def _read(returned: Any) -> Optimization:
    if isinstance(returned, Optimizer):
        return Optimization([returned], [])
    if isinstance(returned, Mapping):
        returned = [returned]
    if isinstance(returned, Sequence) and returned:
        if all(isinstance(item, Optimizer) for item in returned):
            return Optimization(list(returned), [])
        if all(isinstance(item, Mapping) for item in returned):
            known = {"optimizer", "lr_scheduler", "monitor"}
            if unknown := {key for item in returned for key in item} - known:
                names = ", ".join(sorted(map(repr, unknown)))
                problem = f"configure_optimizers gave {names}; give 'optimizer' and 'lr_scheduler'"
                advice = "a scheduler, or a dict of 'scheduler', 'interval' and 'monitor'"
                raise ConfigurationError(f"{problem}: {advice}")
            scheduled = [item for item in returned if "lr_scheduler" in item]
            schedulers = [(item["lr_scheduler"], item.get("monitor")) for item in scheduled]
            return _pair([item.get("optimizer") for item in returned], schedulers)
        if len(returned) == 2 and all(isinstance(item, Sequence) for item in returned):
            return _pair(returned[0], [(scheduler, None) for scheduler in returned[1]])
    raise ConfigurationError(
        f"configure_optimizers returned {type(returned).__name__}; return an optimizer, a list of "
        "optimizers, ([optimizers], [schedulers]), or dicts with 'optimizer' and 'lr_scheduler'"
    )


def _pair(optimizers: Sequence[Any], schedulers: Sequence[tuple[Any, Any]]) -> Optimization:
    """``schedulers``: each with the ``monitor`` that may stand beside it."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"configure_optimizers gave {type(optimizer).__name__} where an optimizer belongs"
            )
    return Optimization(list(optimizers), [_read_scheduler(*scheduler) for scheduler in schedulers])


def _read_scheduler(entry: Any, monitor: Any) -> SchedulerConfig:
    given = entry if isinstance(entry, Mapping) else {"scheduler": entry}
    fields = {"monitor": monitor, **given}
    scheduler = fields.get("scheduler")
    fixed = {"frequency": 1, "strict": True}
    fields = {name: value for name, value in fields.items() if fixed.get(name, fields) != value}
    unknown = fields.keys() - {"scheduler", "interval", "monitor"}
    if unknown or not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        what = f": {(name := min(map(str, unknown)))!r} is not supported" if unknown else ""
        advice = "; give one that derives from LRScheduler, or a dict of 'scheduler', 'interval' "
        advice += "and 'monitor'; step another kind in on_train_epoch_start"
        advice = (unknown and instead("scheduler", name)) or advice
        raise ConfigurationError(f"lr_scheduler{what or f' {shown(entry)}'}{advice}")
    made = SchedulerConfig(**fields)
    if made.interval not in ("step", "epoch"):
        raise ConfigurationError(f"lr_scheduler interval={made.interval!r}: use 'step' or 'epoch'")
    if isinstance(scheduler, ReduceLROnPlateau) and made.monitor is None:
        raise ConfigurationError("ReduceLROnPlateau needs 'monitor': the name of a logged value")
    return made
