"""Find the part of an object that cannot be pickled, and suggest what to do instead.

Used where a launcher pickles the run for new processes (``ddp_spawn``). Paths are written as
Python expressions: ``model.layers[2].activation``, ``loader.dataset.tables["a"]``.
"""

import functools
import io
import json
import pickle
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def find_unpicklable(value: object, name: str) -> str | None:
    """The innermost part of a value that cannot be pickled, and the remedy; ``None``: no part."""
    if (error := _error(value)) is None:
        return None
    passed = set[int]()
    while id(value) not in passed:
        passed.add(id(value))
        for label, item in _parts(value):
            if id(item) not in passed and (inner := _error(item)) is not None:
                value, name, error = item, name + label, inner
                break
    return _line(value, name, error)


class _WithoutData(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return vars(value) if isinstance(value, Tensor) else None


def _error(value: object) -> Exception | None:
    try:
        _WithoutData(io.BytesIO()).dump(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """The parts that have a path, each with its path relative to the value."""
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, dict):
        yield from ((f"[{_key(key)}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", member) for index, member in enumerate(value))
    elif not isinstance(value, type | FunctionType):
        for key, member in getattr(value, "__dict__", {}).items():
            if isinstance(value, nn.Module) and key in ("_modules", "_parameters", "_buffers"):
                named = member.items()
                yield from ((f".{k}" if k.isidentifier() else f"[{_key(k)}]", v) for k, v in named)
            else:
                yield f".{key}", member


def _key(key: object) -> str:
    is_number = isinstance(key, str) and key.isdecimal()  # of a child of nn.Sequential
    return str(key) if is_number else json.dumps(key) if isinstance(key, str) else repr(key)


def _line(value: Any, path: str, error: Exception) -> str:
    is_definition = isinstance(value, type | FunctionType)
    named: Any = value if is_definition else type(value)
    kind = "" if is_definition else "of type "
    remedy = "create it in on_fit_start, and exclude it in __getstate__"
    if is_definition or "<locals>" in named.__qualname__:
        remedy = "define it at the top level of a module, with def or class"
    reason = f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if str(error).startswith(("cannot pickle", "Can't pickle", "Can't get local")):
        reason = ""  # it only repeats what cannot be pickled
    return (
        f"{path} is {kind}{named.__module__}.{named.__qualname__}, which cannot be pickled{reason};"
        f" {remedy}, or use strategy='ddp', which pickles nothing"
    )
