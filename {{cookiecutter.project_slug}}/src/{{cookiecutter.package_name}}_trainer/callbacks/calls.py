"""Create the callbacks of a run, and collect their hooks and those of the module."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ..errors import Problems, UserError, refuse, shown
from ..module import Run, TrainingModule
from ..module.hooks import Hooks, is_overridden, problems_of_names, problems_of_signatures
from ..options import class_paths
from .callback import Callback

_FILES = {
    "measuring": ("Profile", "SystemMonitor"),
    "monitored": ("BestCheckpoint", "EarlyStopping"),
    "weight_averages": ("EMA", "StochasticWeightAveraging"),
}
BUILT_IN = {name: f"{__package__}.{file}.{name}" for file in _FILES for name in _FILES[file]}
"""Their class paths by name: a file is imported when one of them is used."""
_FIRST = "_state_of_first_fit"
_OF_OTHERS = (
    r"on_(evaluate|predict|log|save|step)|(before|after)_(fit|train|validate|epoch|batch|step|loss)"
    r"|(fit|epoch|batch|eval)_(start|end)"
)
_Calls = tuple[Callable[..., Any], ...]
_Around = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class HookCalls:
    """The overridden hooks by name, those of callbacks first; the loop calls only these.

    ``callbacks``: by the name of their state in checkpoints.
    """

    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    on_fit_start: _Calls = ()
    on_fit_end: _Calls = ()
    on_train_epoch_start: _Calls = ()
    on_train_epoch_end: _Calls = ()
    on_train_batch_start: _Calls = ()
    on_train_batch_end: _Calls = ()
    on_before_optimizer_step: _Calls = ()
    on_after_optimizer_step: _Calls = ()
    on_validation_start: _Calls = ()
    on_validation_end: _Calls = ()
    on_exception: _Calls = ()
    _read: Sequence[tuple[object, str, Any]] = ()  # at the start: of what, its name, its value

    def check(self) -> None:
        """Raise UserError if user code has replaced a hook, or another thing that is read once."""
        for owner, name, value in self._read:
            if getattr(owner, name) != value:
                line = f"{type(owner).__name__}.{name} was replaced when the fit had begun"
                raise UserError(f"{line}, without effect: set it in the class, for all of a fit")

    def state(self) -> dict[str, Any]:
        states = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        return {name: state for name, state in states.items() if state}

    def load_state(self, saved: Mapping[str, Any]) -> list[str]:
        """Load the states of a checkpoint; return notes on what could not be loaded."""
        for name in saved.keys() & self.callbacks.keys():
            self.callbacks[name].load_stored_state(saved[name])
        return [
            f"the checkpoint has the state of {without_module(name)}, which is not among the "
            "callbacks of this run"
            for name in sorted(saved.keys() - self.callbacks.keys())
        ]

    def failed(self, error: BaseException) -> None:
        """Call the ``on_exception`` hooks; if one raises, a note of the error says so."""
        for call in self.on_exception:
            try:
                call(error)
            except Exception as another:
                error.add_note(f"on_exception also raised {type(another).__name__}: {another}")


def calls_of(
    callbacks: Sequence[Callback], trainer: Run, module: TrainingModule, around: _Around | None
) -> HookCalls:
    """Collect the hooks that are overridden; ``around``: the context of each, by its name."""
    hooks = {}
    names = [hook.name for hook in fields(HookCalls) if hook.name.startswith("on_")]
    for name in names:
        owners = [callback for callback in callbacks if is_overridden(callback, Callback, name)]
        of_module = [getattr(module, name)] if _has_own(module, name) else []
        calls = [*(partial(getattr(owner, name), trainer, module) for owner in owners), *of_module]
        if around is not None and name != "on_exception":  # of one rank
            calls = [partial(_call_within, around, name, call) for call in calls]
        hooks[name] = tuple(calls)
    names += ["count_samples", "count_weight", "automatic_optimization"]
    pairs = [(owner, name) for owner in (*callbacks, module) for name in names]
    read = [(*pair, getattr(*pair)) for pair in pairs if hasattr(type(pair[0]), pair[1])]
    stateful = {_identity(callback): callback for callback in _stateful(callbacks)}
    return HookCalls(stateful, **hooks, _read=read)


def start_fresh(callbacks: Sequence[Callback]) -> None:
    """Give each callback the state with which it began its first fit; a resume loads another.

    An average resets itself: it has a state during a fit only.
    """
    for callback in _stateful(callbacks):
        if "parameter_averaging" in callback.needs:
            continue
        if _FIRST in vars(callback):
            callback.load_state_dict(copy.deepcopy(vars(callback)[_FIRST]))
        elif is_overridden(callback, Callback, "load_state_dict"):
            with suppress(Exception):  # its on_fit_start creates the state, and so resets it
                vars(callback)[_FIRST] = copy.deepcopy(callback.state_dict())


def _call_within(around: _Around, name: str, call: Callable[..., None], *args: Any) -> None:
    with around(name):
        call(*args)


def _has_own(module: TrainingModule, name: str) -> bool:
    return hasattr(Hooks, name) and is_overridden(module, Hooks, name)


def _stateful(callbacks: Sequence[Callback]) -> list[Callback]:
    return [callback for callback in callbacks if is_overridden(callback, Callback, "state_dict")]


def _identity(callback: Callback) -> str:
    """The name of a callback's state: class, and name or monitor and mode; not its position."""
    kind = type(callback)
    path = f"{kind.__module__}.{kind.__qualname__}"
    title = kind.__name__ if BUILT_IN.get(kind.__name__) == path else path
    names = ("name",) if isinstance(callback.name, str) else ("monitored", "mode")
    parts = [value for name in names if isinstance(value := getattr(callback, name, None), str)]
    return f"{title}({', '.join(parts)})" if parts else title


def without_module(identity: str) -> str:
    """The name of a callback's state as it is shown."""
    path, bracket, rest = identity.partition("(")
    return path.rpartition(".")[2] + bracket + rest


def create(callbacks: object, problems: Problems) -> tuple[Callback, ...]:
    """Create the callbacks of ``Trainer(callbacks=…)``; ``problems`` collects a line per error."""
    callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks
    if not isinstance(callbacks, list | tuple):
        problems.add(f"callbacks={shown(callbacks)}: give a list of callbacks, or of class paths")
        return ()
    made: list[Callback] = []
    for index, item in enumerate(callbacks):
        with problems:
            callback = class_paths.create(f"callbacks[{index}]", item, Callback, BUILT_IN)
            lines = problems_of_names(callback, Callback, _OF_OTHERS)
            refuse(lines + problems_of_signatures(callback, Callback))
            made.append(callback)
    averages = [type(c).__name__ for c in made if "parameter_averaging" in c.needs]
    if len(averages) > 1:
        problems.add(f"callbacks: {' and '.join(averages)}: validations use one average; keep one")
        return tuple(made)
    problems.lines += [
        f"callbacks: {count} are {without_module(name)}, and a checkpoint could not tell their "
        "states apart: give each its own name"
        for name, count in Counter(map(_identity, _stateful(made))).items()
        if count > 1
    ]
    return tuple(made)


def problems_of_manual(callbacks: Sequence[Callback], module: TrainingModule) -> list[str]:
    """One line for each hook that is not called with manual optimization."""
    name = "on_before_optimizer_step"
    owners: list[object] = [c for c in callbacks if is_overridden(c, Callback, name)]
    owners += [module] if _has_own(module, name) else []
    return [
        f"{type(owner).__name__}.{name} is not called with manual optimization; use training_step"
        for owner in owners
    ]
