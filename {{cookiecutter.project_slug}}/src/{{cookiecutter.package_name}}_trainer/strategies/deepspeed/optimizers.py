"""DeepSpeed's one optimizer and one scheduler, from its configuration or from the code.

ZeRO's optimizer steps slices of all parameters, with zeros where a step computed no gradient: it
would decay those weights, and move them on by their momentum. They are left as they were.

Source: https://www.deepspeed.ai/docs/config-json/#optimizer-parameters
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ...errors import ConfigurationError, refuse
from ...launch import collectives, output
from ...module import TrainingModule
from .. import engine_optimizers
from ..gradients.averaging import leaving_out_unused
from ..optimizers import Optimization, SchedulerConfig
from . import settings
from .onebit_adam import OneBitAdam
from .state import Slice, Slices


def configured(
    config: Mapping[str, Any], module: TrainingModule, configure: Callable[[], Optimization]
) -> Optimization:
    """Check the module's optimizers; empty if the configuration has an optimizer."""
    optimization, named = Optimization([], []), settings.kind(config, "optimizer")
    has_none = type(module).configure_optimizers is TrainingModule.configure_optimizers
    if named is None or not has_none:
        optimization = configure()
        refuse(problems_of(optimization, config))
    if named is not None:
        return Optimization([], [])
    if settings.kind(config, "scheduler") is not None:
        return Optimization(optimization.optimizers, [])
    return optimization


def problems_of(optimization: Optimization, config: Mapping[str, Any]) -> list[str]:
    """One line for each property of optimizers and schedulers that DeepSpeed does not support."""
    lines = [
        f"configure_optimizers gave {len(items)} {what}, and DeepSpeed steps one optimizer with "
        f"one scheduler; {instead}, or use strategy='ddp'"
        for items, what, instead in (
            (optimization.optimizers, "optimizers", "put their parameters into groups of one"),
            (optimization.schedulers, "schedulers", "chain them in a SequentialLR"),
        )
        if len(items) > 1
    ]
    has_own = settings.kind(config, "optimizer") is not None
    if has_own and optimization.schedulers and settings.kind(config, "scheduler") is None:
        lines.append(
            "the DeepSpeed configuration's optimizer replaces the one whose rates the scheduler of "
            "configure_optimizers sets; give a scheduler there too, or leave the optimizer out"
        )
    if settings.stage(config) and not has_own:
        lines += _not_sliced(optimization.optimizers, config)
        lines += engine_optimizers.problems_of_code(optimization.optimizers, is_same=True)
        lines += engine_optimizers.problems_of_state(optimization.optimizers)
    return lines


def _not_sliced(made: Sequence[Optimizer], config: Mapping[str, Any]) -> list[str]:
    """One line for each optimizer that cannot step slices of parameters."""
    is_tested = not config.get("zero_allow_untested_optimizer")
    examined, what = f"{engine_optimizers.EXAMINED}|deepspeed", "ZeRO (strategy='deepspeed')"
    unknown = engine_optimizers.problems_of(made, "elements", what, examined) if is_tested else []
    return unknown or [
        f"configure_optimizers gave {type(opt).__name__}, which has a state before its first "
        "step, and ZeRO replaces its parameters by slices; create the state in step, or use "
        "strategy='ddp'"
        for opt in made
        if _has_tensors(opt) and type(opt) is not torch.optim.Adagrad  # which it creates again
    ]


def _has_tensors(optimizer: Optimizer) -> bool:
    """Whether it, or an optimizer in it, keeps tensors beside parameters, such as copies."""
    names = vars(optimizer).keys() - {"param_groups", "defaults"}
    kept = tree_leaves([vars(optimizer)[name] for name in names])
    inner = any(_has_tensors(value) for value in kept if isinstance(value, Optimizer))
    return inner or any(isinstance(value, Tensor) and value.ndim for value in kept)


def one_bit_adam(config: Mapping[str, Any], module: TrainingModule) -> Optimizer:
    """Create the optimizer of a configuration with type ``OneBitAdam``."""
    options = dict(settings.section(config["optimizer"], "params"))
    for name in ("cuda_aware", "comm_backend_name"):  # options of DeepSpeed's own communication
        options.pop(name, None)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    made: Optimizer = _made("OneBitAdam", OneBitAdam, trained, options)
    return made


def configured_scheduler(config: Mapping[str, Any], optimizer: Optimizer) -> list[SchedulerConfig]:
    """Create the scheduler that a configuration names; an empty list if there is none."""
    if (name := settings.kind(config, "scheduler")) is None:
        return []
    from deepspeed.runtime import lr_schedules

    make = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    made = _made(name, make, optimizer, settings.section(config["scheduler"], "params"))
    return [SchedulerConfig(made, interval="step")]


def _made(name: str, make: Callable[..., Any], of: Any, params: Mapping[str, Any]) -> Any:
    try:
        return make(of, **params)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} in the DeepSpeed configuration: {error}") from None


@functools.cache  # once in a process
def _note_common_counts() -> None:
    output.print_lines(
        "note: a step uses other parameters than the one before, and DeepSpeed counts the steps of "
        "all together: Adam corrects its averages as if all were used; strategy='fsdp' does not",
        error=True,
    )


def average_used(engine: Any, named: Sequence[tuple[str, Tensor]], *, averages: bool) -> None:
    """Without ZeRO, average gradients; or not, if the optimizer averages its momentum instead."""
    with leaving_out_unused([tensor for _, tensor in named]):
        if averages:
            engine.allreduce_gradients()
            return
        for _, tensor in named:
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


class UnusedParameters:
    """Restores slices of parameters after ``optimizer`` stepped them without a gradient."""

    def __init__(self, optimizer: Optimizer, slices: Slices, parameters: Sequence[Tensor]) -> None:
        self._slices, self._parameters = slices, parameters
        self._used: set[int] = set()
        self._used_before: set[int] | None = None
        self._kept: dict[tuple[Slice, str], Tensor] = {}
        optimizer.register_step_pre_hook(self._keep)
        optimizer.register_step_post_hook(self._restore)

    def note(self, parameter: Tensor) -> None:
        """Note that a backward has computed the gradient of a parameter."""
        self._used.add(id(parameter))

    def end_step(self, optimizer: Optimizer) -> None:
        """Begin the next step; say once if its optimizer counts steps of others than this one."""
        counts = any("step" in state for state in optimizer.state.values())
        if counts and self._used_before not in (None, self._used) and collectives.rank() == 0:
            _note_common_counts()
        self._used_before, self._used = self._used, set()

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        self._kept = {key: tensor.clone() for key, tensor in self._parts(optimizer).items()}

    @torch.no_grad()
    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for key, tensor in self._parts(optimizer).items():
            tensor.copy_(self._kept[key]) if key in self._kept else tensor.zero_()  # of a new state
        self._kept = {}

    def _parts(self, optimizer: Optimizer) -> dict[tuple[Slice, str], Tensor]:
        """Slices of weights and states that have no gradient, in the tensors that have them."""
        unused = [parameter for parameter in self._parameters if id(parameter) not in self._used]
        places = [place for tensor in unused if (place := self._slices.of(tensor)) and place.length]
        return {
            (place, name): place.within(tensor)
            for place in places
            for name, tensor in {"": place.flat, **optimizer.state.get(place.flat, {})}.items()
            if isinstance(tensor, Tensor) and tensor.shape == place.flat.shape
        }
