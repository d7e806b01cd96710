"""Call the hooks of callbacks and of the module: only those that are overridden."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ..module import Hooks, Run, TrainingModule, is_overridden
from .base import Callback

_OLD_MODULE = re.compile(r"^\w+\.trainer\.callbacks\.\w+\.")
_Call = Callable[..., None]
_Calls = tuple[_Call, ...]


@dataclass(frozen=True)
class HookCalls:
    """The overridden hooks by moment, those of callbacks first: what the loop calls.

    The loop iterates over each tuple; an empty one costs tens of nanoseconds.
    """

    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    """By the name of its state in checkpoints."""
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

    def state(self) -> dict[str, Any]:
        """State of each callback by name."""
        return {
            name: state for name, each in self.callbacks.items() if (state := each.state_dict())
        }

    def load_state(self, saved: Mapping[str, Any]) -> list[str]:
        """Load the states of a checkpoint; return notes on what could not be loaded."""
        # Earlier versions wrote the modules of built-in callbacks too.
        saved = {_OLD_MODULE.sub("", name): state for name, state in saved.items()}
        for name in saved.keys() & self.callbacks.keys():
            self.callbacks[name].load_stored_state(saved[name])
        return [
            f"the checkpoint has the state of {name.rpartition('.')[2]}, which is not among the "
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


def calls_of(callbacks: Sequence[Callback], trainer: Run, module: TrainingModule) -> HookCalls:
    """Collect the hooks that are overridden."""
    found = {
        moment.name: (
            *(
                partial(getattr(each, moment.name), trainer, module)
                for each in _with(callbacks, moment.name)
            ),
            *(getattr(module, moment.name) for _ in _own(module, moment.name)),
        )
        for moment in fields(HookCalls)
        if moment.name != "callbacks"
    }
    return HookCalls(_named(callbacks), **found)


def _with(callbacks: Sequence[Callback], name: str) -> Iterator[Callback]:
    return (each for each in callbacks if is_overridden(each, Callback, name))


def _own(module: TrainingModule, name: str) -> Iterator[TrainingModule]:
    if hasattr(Hooks, name) and is_overridden(module, Hooks, name):
        yield module


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by class, numbered from the second of a class on; built-in ones without module."""
    named: dict[str, Callback] = {}
    seen: Counter[str] = Counter()
    for each in callbacks:
        kind = type(each)
        is_built_in = kind.__module__.startswith(f"{__package__}.")
        name = kind.__qualname__ if is_built_in else f"{kind.__module__}.{kind.__qualname__}"
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name}#{seen[name]}"] = each
    return named


# --- checks --------------------------------------------------------------------------------------


def problems_of_manual(callbacks: Sequence[Callback], module: TrainingModule) -> list[str]:
    """One line for each hook that is not called with manual optimization."""
    name = "on_before_optimizer_step"
    owners: list[object] = [*_with(callbacks, name), *_own(module, name)]
    return [
        f"{type(each).__name__}.{name} is not called with manual optimization; use training_step"
        for each in owners
    ]
