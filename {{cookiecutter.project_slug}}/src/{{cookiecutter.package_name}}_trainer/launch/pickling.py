"""Find the part of an object that cannot be pickled, and suggest what to do instead.

Used where a launcher pickles the run for new processes (``ddp_spawn``). Paths are written as
Python expressions: ``model.layers[2].activation``, ``loader.dataset.tables["a"]``.
"""

import copyreg
import functools
import json
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, pickle.PickleBuffer}
_CHILDREN = ("_modules", "_parameters", "_buffers")
# A chain of objects may be infinite.
_MOST_OBJECTS = 100_000

_Part = tuple[str | None, object]
"""The path of a part relative to its container, ``.name`` or ``[0]``, and the part.

``None`` if there is no expression for it, as for an element of a set.
"""


def find_unpicklable(value: object, name: str) -> str | None:
    """Describe the part of a value that cannot be pickled, and the remedy, in one line.

    Args:
        value: Any object; of tensors, only the attributes are checked, not the data.
        name: The user's name for the object, with which the path starts.

    Returns:
        The line, for the shortest path; ``None`` if no part was found.
    """
    places = deque([(value, name, "is")])
    # Keep the objects: the id of a deleted object could be reused.
    seen: dict[int, object] = {}
    while places and len(seen) < _MOST_OBJECTS:
        value, path, verb = places.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        try:
            parts = [part for part in _parts(value) if type(part[1]) not in _ATOMS]
        except Exception as error:
            return _line(value, f"{path} {verb}", error)
        for label, part in parts:
            if verb == "holds" or label is None:
                places.append((part, path, "holds"))
            else:
                places.append((part, path + label, "is"))
    return None


def _parts(value: Any) -> Iterator[_Part]:
    """The parts that pickle would visit; raises the error of pickle if it cannot."""
    kind = type(value)
    if isinstance(value, type | FunctionType):
        pickle.dumps(value)
    elif isinstance(value, MethodType | functools.partial):
        names = ("__self__",) if isinstance(value, MethodType) else ("func", "args", "keywords")
        yield from ((f".{name}", getattr(value, name)) for name in names)
    elif isinstance(value, Tensor):
        yield from _attributes(value, vars(value))
    elif kind is dict:
        yield from _items(value.items())
    elif kind in (list, tuple) or hasattr(value, "_fields"):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    else:
        reduce = copyreg.dispatch_table.get(kind)
        reduced: Any = reduce(value) if reduce else value.__reduce_ex__(5)
        if isinstance(reduced, str):
            pickle.dumps(value)
            return
        make, arguments, state, elements, items = (*reduced, *[None] * 3)[:5]
        yield from ((None, each) for each in (make, *arguments))
        # An object with __slots__ has two dicts: its __dict__ and its slots.
        for each in state if type(state) is tuple and len(state) == 2 else (state,):
            yield from _attributes(value, each) if isinstance(each, dict) else [(None, each)]
        yield from ((f"[{index}]", part) for index, part in enumerate(elements or ()))
        yield from _items(items or ())


def _attributes(owner: object, attributes: Mapping[Any, object]) -> Iterator[_Part]:
    for name, value in attributes.items():
        if isinstance(owner, nn.Module) and name in _CHILDREN and isinstance(value, dict):
            yield from _attributes(owner, value)
        elif isinstance(name, str) and (name.isdecimal() or name.isidentifier()):
            # Children of nn.Sequential and nn.ModuleList are named "0", "1", …
            yield f"[{name}]" if name.isdecimal() else f".{name}", value
        else:
            yield from _items([(name, value)])


def _items(items: Any) -> Iterator[_Part]:
    for key, value in items:
        yield None, key
        yield f"[{json.dumps(key) if isinstance(key, str) else repr(key)}]", value


def _line(value: Any, place: str, error: Exception) -> str:
    is_definition = isinstance(value, type | FunctionType)
    named = value if is_definition else type(value)
    what = f"{'' if is_definition else 'of type '}{named.__module__}.{named.__qualname__}"
    remedy = "create it in on_fit_start, and exclude it in __getstate__"
    if is_definition:
        remedy = "define it at the top level of a module, with def or class"
    reason = f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if str(error).startswith(("cannot pickle", "Can't pickle", "Can't get local")):
        reason = ""  # it only repeats what cannot be pickled
    return (
        f"{place} {what}, which cannot be pickled{reason}; {remedy}, or use strategy='ddp', which "
        "pickles nothing"
    )
