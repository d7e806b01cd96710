"""Which hooks a class overrides, and whether they can be called."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def is_overridden(owner: object, base: type, name: str) -> bool:
    """Whether an object has its own version of a method of a base class."""
    method = getattr(owner, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def problems_of_signatures(owner: object, base: type) -> list[str]:
    """One line for each overridden hook that cannot be called with the hook's arguments."""
    return [
        f"{type(owner).__name__}.{name} takes {_shown(getattr(owner, name))}; it is called with "
        f"({', '.join(expected)})"
        for name in vars(base)
        if not name.startswith("_") and callable(getattr(base, name))
        if is_overridden(owner, base, name)
        if not _takes(getattr(owner, name), expected := _arguments(base, name))
    ]


def _shown(method: Callable[..., Any]) -> str:
    return str(inspect.signature(method).replace(return_annotation=inspect.Signature.empty))


def _arguments(base: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(base, name)).parameters)[1:]


def _takes(method: Callable[..., Any], arguments: Sequence[str]) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True
