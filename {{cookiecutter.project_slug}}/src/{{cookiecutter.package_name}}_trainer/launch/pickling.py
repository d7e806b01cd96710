"""Find the part of an object that cannot be pickled, and suggest what to do instead.

Used where a launcher pickles the run for new processes (``ddp_spawn``). Paths are written as
Python expressions: ``model.layers[2].activation``, ``loader.dataset.tables["a"]``.
"""

import copyreg
import functools
import json
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
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
        if id(value) in seen or type(value) in _ATOMS:
            continue
        seen[id(value)] = value
        try:
            for label, part in list(_parts(value)):
                if verb == "is" and label is not None:
                    places.append((part, path + label, "is"))
                else:
                    places.append((part, path, "holds"))
        except Exception as error:
            return _line(value, f"{path} {verb}", error)
    return None


def _parts(value: Any) -> Iterator[_Part]:
    """The parts that pickle would visit; raises the error of pickle if it cannot."""
    if isinstance(value, type | FunctionType):
        pickle.dumps(value)
    elif isinstance(value, MethodType | functools.partial):
        names = ("__self__",) if isinstance(value, MethodType) else ("func", "args", "keywords")
        yield from ((f".{name}", getattr(value, name)) for name in names)
    elif isinstance(value, Tensor):
        yield from _items(vars(value).items(), value)
    elif type(value) is dict:
        yield from _items(value.items())
    elif type(value) in (list, tuple) or hasattr(value, "_fields"):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    else:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced: Any = reduce(value) if reduce else value.__reduce_ex__(5)
        if isinstance(reduced, str):
            pickle.dumps(value)
            return
        make, arguments, state, elements, items = (*reduced, *[None] * 3)[:5]
        yield from ((None, each) for each in (make, *arguments))
        # An object with __slots__ has two dicts: its __dict__ and its slots.
        for each in state if type(state) is tuple and len(state) == 2 else (state,):
            yield from _items(each.items(), value) if isinstance(each, dict) else [(None, each)]
        yield from ((f"[{index}]", part) for index, part in enumerate(elements or ()))
        yield from _items(items or ())


def _items(items: Iterable[tuple[Any, Any]], owner: object = None) -> Iterator[_Part]:
    """The items of a dict, or the attributes of its owner."""
    for key, value in items:
        if isinstance(owner, nn.Module) and key in _CHILDREN and isinstance(value, dict):
            yield from _items(value.items(), owner)
        elif owner is not None and isinstance(key, str) and key.isidentifier():
            yield f".{key}", value
        elif owner is not None and isinstance(key, str) and key.isdecimal():
            yield f"[{key}]", value  # a child of nn.Sequential or nn.ModuleList
        else:
            yield None, key
            yield f"[{json.dumps(key) if isinstance(key, str) else repr(key)}]", value


def _line(value: Any, place: str, error: Exception) -> str:
    remedy = "create it in on_fit_start, and exclude it in __getstate__"
    named: Any = type(value)
    what = "of type "
    if isinstance(value, type | FunctionType):
        remedy = "define it at the top level of a module, with def or class"
        named, what = value, ""
    reason = f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if str(error).startswith(("cannot pickle", "Can't pickle", "Can't get local")):
        reason = ""  # it only repeats what cannot be pickled
    return (
        f"{place} {what}{named.__module__}.{named.__qualname__}, which cannot be pickled{reason}; "
        f"{remedy}, or use strategy='ddp', which pickles nothing"
    )
