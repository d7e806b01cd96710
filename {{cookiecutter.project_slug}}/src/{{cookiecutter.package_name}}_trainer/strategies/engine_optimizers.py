"""The optimizers of a user that an engine creates again, gives something else to step, or copies.

Those that compute an element from others are refused where a process steps only some of them: those
of torch and widely used libraries are known by name; a class of anyone else declares it. Numbers
that a step draws are equal where several processes step the same: each rank has its own generators,
as for dropout, and replicas would drift apart without a word.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..data import randomness
from ..errors import ConfigurationError, UserError, one_line, refuse
from ..module import TrainingModule
from .optimizer_state import STEPS_SHARD
from .precision import Precision

Cut = Literal["elements", "parameters"]
T = TypeVar("T", bound=Optimizer)
_SETTING = str | int | float | None | Tensor | FunctionType | BuiltinFunctionType
_OF_TORCH = {"state", "param_groups", "defaults", "step"}

# Packages whose optimizers are elementwise, except those named below.
EXAMINED = "torch.optim|timm|transformers|pytorch_optimizer|torch_optimizer|bitsandbytes|apex"
_OF_ALL = (  # they use other parameters, such as the norm of all gradients, or draw random numbers
    "adagc|adai|alig|avagrad|dadapt.*|gravity|kron|(fused.*)?lamb(8bit|32bit)?|lbfgs|magma|prodigy"
)
_OF_PARAMETER = (  # they use other elements of the same parameter: norms, factors, projections
    "a2grad|adafactor.*|adago|adahessian|adalite|adammini|adamp|adanorm|adashift|adatam|aida|alice|"
    "amos|apollo.*|came|conda|dash|emofact|fadam|fira|flashadamw|fromage|galore.*|larc|"
    "(pytorch)?lars(8bit|32bit)?|lorarite|mars|.*muon.*|nero|.*novograd|racs|ralamb|ranger.*|rose|"
    "scion.*|sgdp|sgdsai|.*shampoo|sm3|soap|spectralsphere|splus|stableadamw|stablespam|swats|tam"
)


class EngineGroups:
    """Parameter groups that an engine has taken over: which parameters they have may not change.

    ``shown``: what hooks find in each group of the engine's optimizers, instead of what it steps.
    ``grows``: whether the engine steps groups that are added.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        shown: Sequence[Sequence[Tensor]] | None = None,
        grows: bool = False,
    ) -> None:
        self._optimizers, self._shown, self._grows = optimizers, shown, grows
        self._groups = [list(optimizer.param_groups) for optimizer in optimizers]
        self._noted = [len(ids) if shown else ids for ids in self._parameters()]

    def _parameters(self) -> list[list[int]]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return [[*map(id, group["params"])] for group in groups]

    def check(self) -> None:
        """Raise UserError if groups have changed; of ``shown`` ones, outside of :meth:`showing`."""
        ids: list[Any] = self._parameters()
        ids = ids[: len(self._noted)] if self._grows else ids
        if len(ids) != len(self._noted) or (self._shown is None and ids != self._noted):
            raise self._changed()

    def _changed(self) -> UserError:
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            optimizer.param_groups[:] = groups  # for the engine's teardown
        name = type(self._optimizers[0]).__name__
        return UserError(
            f"the parameter groups of {name} have changed since the fit began, and the strategy "
            "steps those of then: give all parameters to configure_optimizers, and change "
            "requires_grad; or use strategy='fsdp'"
        )

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Context of a hook, in which groups have parameters, not what an engine steps."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        stepped = [group["params"] for group in groups] if self._shown else []
        for group, parameters in zip(groups, self._shown or (), strict=False):
            group["params"] = list(parameters)
        try:
            yield
            shown = [[*map(id, parameters)] for parameters in self._shown or ()]
            if self._shown is not None and self._parameters() != shown:
                raise self._changed()
        finally:
            for group, parameters in zip(groups, stepped, strict=False):
                group["params"] = parameters


def sharded_optimizer(sharded: Callable[..., T], optimizer: Optimizer) -> T:
    """Create a sharded optimizer, whose inner one has the class and options of the user's.

    It has all parameters in its groups; its inner one, ``optim``, has this process' shard of them
    and their state (torch's ``ZeroRedundancyOptimizer``, and similar ones).
    """
    refuse(problems_of_state([optimizer]))
    kind = type(optimizer)
    # Some optimizers have defaults that are no arguments (AdamW: decoupled_weight_decay).
    takes = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in takes}
    try:
        made = sharded(optimizer.param_groups, kind, **options)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise not_created(optimizer, error) from None
    vars(made)[STEPS_SHARD] = True
    take_over(optimizer, made, vars(made)["optim"])
    return made


def not_created(optimizer: Optimizer, error: Exception) -> ConfigurationError:
    """The error of an optimizer that an engine cannot create again, as one that wraps another."""
    given = f"configure_optimizers gave {type(optimizer).__name__}"
    problem = f"which cannot be created again from its settings ({one_line(error)})"
    return ConfigurationError(f"{given}, {problem}; use strategy='ddp'")


def take_over(optimizer: Optimizer, made: Optimizer, inner: Optimizer) -> None:
    """Give ``inner``, which an engine has created and steps, settings and state of the user's.

    Settings are numbers, text, functions and tensors, but no lists of them by parameter. Code that
    has the user's optimizer, such as a schedule, then changes ``made``.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        leaves, there = tree_leaves(value), tree_leaves(vars(inner).get(name))
        is_setting = all(isinstance(leaf, _SETTING) and id(leaf) not in known for leaf in leaves)
        is_of_torch = name in _OF_TORCH or name.startswith("_optimizer_")  # hooks
        if is_setting and not is_of_torch and (there == [None] or len(there) == len(leaves)):
            vars(inner)[name] = value
    held = [parameter for group in inner.param_groups for parameter in group["params"]]
    inner.state.update({key: optimizer.state[key] for key in held if key in optimizer.state})
    made.state = optimizer.state = inner.state  # which the user's code may reset
    optimizer.param_groups = made.param_groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers would warn otherwise


def problems_of(
    optimizers: Iterable[Optimizer], cut: Cut, strategy: str, examined: str = EXAMINED
) -> list[str]:
    """One line for each class that cannot step slices of parameters, or some of them.

    ``strategy``: its name; ``examined``: a pattern of packages whose classes are known by name.
    """
    kinds = {type(inner): None for optimizer in optimizers for inner in _with_inner(optimizer)}
    fits = {kind.__name__: _fits(kind, cut, examined) for kind in kinds}
    return [
        f"configure_optimizers gave {name}, "
        + (
            f"which uses other {cut} than those that a process steps under {strategy}; use "
            f"another, such as AdamW, or strategy='ddp', or set {name}.is_elementwise = True to "
            "train anyway"
            if does_fit is False
            else f"which {strategy} does not know, and steps only some {cut} in a process: set "
            f"{name}.is_elementwise = True if an element's update depends on that element alone, "
            "or is_parameterwise = True if on its parameter alone; otherwise use strategy='ddp'"
        )
        for name, does_fit in fits.items()
        if not does_fit
    ]


def problems_of_state(optimizers: Iterable[Optimizer]) -> list[str]:
    """One line for each optimizer whose ``state_dict`` has more than what an engine saves."""
    return [
        f"configure_optimizers gave {type(optimizer).__name__}, whose own state_dict would not be "
        "saved: keep tensors in self.state, numbers in param_groups, or use strategy='ddp'"
        for optimizer in optimizers
        if type(optimizer).state_dict is not Optimizer.state_dict
    ]


def problems_of_code(optimizers: Iterable[Optimizer], *, is_same: bool = False) -> list[str]:
    """One line for each optimizer with code attached that an engine does not call, or undoes.

    ``is_same``: the engine calls it, and then overwrites what a hook after the step has changed.
    """
    lines = []
    for optimizer in optimizers:
        own = vars(optimizer)
        after = own.get("_optimizer_step_post_hooks")
        has_hooks = after or own.get("_optimizer_step_pre_hooks")
        has_step = "step" in own and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if after or (not is_same and (has_hooks or has_step)):
            what = "hooks of its step" if has_hooks else "a step that was replaced"
            lines.append(
                f"configure_optimizers gave {type(optimizer).__name__} with {what}, which has no "
                "effect with this strategy: use on_before_optimizer_step and "
                "on_after_optimizer_step, or strategy='ddp'"
            )
    return lines


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from _with_inner(value)


def _fits(kind: Any, cut: Cut, examined: str) -> bool | None:
    """Whether its step is right for this cut; ``None`` if nothing is known of its step."""
    for index, cls in enumerate(kind.__mro__):
        members = vars(cls)
        if {"is_elementwise", "is_parameterwise"} & members.keys():
            by_parameter = cut == "parameters" and members.get("is_parameterwise")
            return bool(members.get("is_elementwise") or by_parameter)
        if re.match(rf"({examined})\b", cls.__module__):
            known = _OF_ALL if cut == "parameters" else f"{_OF_ALL}|{_OF_PARAMETER}"
            names = (base.__name__.lower() for base in kind.__mro__[index:])
            return not any(re.fullmatch(known, name) for name in names)
        # torch wraps the step of each class that it creates, also an inherited one.
        inherited: Any = getattr(super(cls, kind), "step", None)
        if "step" in members and inspect.unwrap(members["step"]) is not inspect.unwrap(inherited):
            return None
    return None


@contextmanager
def requiring_grad(parameters: Iterable[Tensor], value: bool) -> Iterator[None]:
    changed = [parameter for parameter in parameters if parameter.requires_grad is not value]
    for parameter in changed:
        parameter.requires_grad_(value)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not value)


class Noise:
    """Contexts of optimizers' steps in a run, in which all replicas draw the same."""

    _step, _number = -1, 0

    def __init__(self, module: TrainingModule, devices: Sequence[torch.device]) -> None:
        self._module, self._devices = module, devices

    @contextmanager
    def alike(self, optimizer: Optimizer) -> Iterator[None]:
        """Draw by the run's seed and the step, but in shards, which only one process steps."""
        run = self._module.trainer_state.run
        if run is None or STEPS_SHARD in vars(optimizer):
            yield
            return
        # Each optimizer draws its own numbers, and each of several steps in manual optimization.
        self._number = self._number + 1 if run.global_step == self._step else 0
        self._step, kind = run.global_step, self._devices[0].type
        devices = self._devices if kind != "cpu" else ()
        kind = kind if devices else "cuda"
        with randomness.kept(), torch.random.fork_rng(devices, device_type=kind):
            randomness.seed_generators(randomness.mix(run.seed, self._step, self._number))
            yield


def step_alone(
    optimizer: Optimizer,
    precision: Precision,
    device: torch.device,
    has_copies: Callable[[Optimizer], bool],
) -> None:
    """Step an optimizer; UserError if it draws random numbers, and others hold its parameters."""
    if type(optimizer).step.__module__.startswith("torch.") or not has_copies(optimizer):
        precision.step(optimizer)
        return
    before = randomness.full_state([device])
    precision.step(optimizer)
    after = randomness.full_state([device])
    if not all(torch.equal(state, after[name]) for name, state in before.items()):
        problem = f"{type(optimizer).__name__}.step draws random numbers"
        others = "processes that hold copies of the same weights would draw others"
        raise UserError(f"{problem}, and {others}; use strategy='ddp'")
