"""Find the part of an object that cannot be pickled, and suggest what to do instead.

Used where a launcher pickles the run for new processes (``ddp_spawn``). Paths are written as
Python expressions: ``model.layers[2].activation``, ``loader.dataset.tables["a"]``.
"""

import copyreg
import functools
import inspect
import io
import json
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

_ALTERNATIVE = "or use strategy='ddp', which pickles nothing"
_ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, pickle.PickleBuffer}
# Do not look inside objects of the standard library, except those that contain other objects.
_NAMED_WHOLE = sys.stdlib_module_names - {
    *("argparse", "builtins", "collections", "functools", "itertools", "types")
}
# pickle itself fails on deeper nesting, and a chain of objects may be infinite.
_DEEPEST = 500

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
        The line, for the shortest path; ``None`` if the value can be pickled.
    """
    error = _error(value)
    if error is None:
        return None
    found = _search(value, name)
    if found is not None:
        return _line(*found)
    if isinstance(error, RecursionError):
        why = "is nested too deeply to be pickled; keep its parts in a list"
    else:
        why = f"cannot be pickled{_reason(error)}; create it differently"
    return f"{name} {why}, {_ALTERNATIVE}"


# --- test whether an object can be pickled -------------------------------------------------------


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        """Skip the data of tensors: it can always be pickled, and may be large."""
        if isinstance(obj, Tensor):
            return type, (type(obj),), vars(obj)
        return NotImplemented


class _NullFile:
    def write(self, data: bytes, /) -> int:
        return len(data)


def _try(value: object) -> None:
    _Pickler(_NullFile(), protocol=5, buffer_callback=lambda buffer: None).dump(value)


def _error(value: object) -> Exception | None:
    try:
        _try(value)
    except Exception as error:
        return error
    return None


# --- find the part that fails --------------------------------------------------------------------


class _Place(NamedTuple):
    value: object
    path: str
    is_inside: bool  # whether the path is that of a container, because there is none for the value
    depth: int

    def step(self, part: _Part) -> "_Place":
        label, value = part
        is_inside = self.is_inside or label is None
        path = self.path if is_inside else f"{self.path}{label}"
        return _Place(value, path, is_inside, self.depth + 1)


def _search(value: object, name: str) -> tuple[_Place, Exception] | None:
    """The nearest object that fails by itself, not because of its parts; breadth first."""
    places = deque([_Place(value, name, is_inside=False, depth=0)])
    # Keep the objects: the id of a deleted object could be reused.
    seen: dict[int, object] = {}
    while places:
        place = places.popleft()
        if id(place.value) in seen or place.depth > _DEEPEST:
            continue
        seen[id(place.value)] = place.value
        try:
            parts = [part for part in _parts(place.value) if type(part[1]) not in _ATOMS]
        except Exception as error:
            return place, error
        places.extend(map(place.step, parts))
    return None


def _parts(value: object) -> Iterator[_Part]:
    """The parts that pickle would visit; raises the error of pickle if it cannot."""
    kind = type(value)
    if isinstance(value, type | FunctionType) or kind.__module__.split(".")[0] in _NAMED_WHOLE:
        _try(value)
    elif kind is dict:
        yield from _items(value.items())  # type: ignore[attr-defined]
    elif kind is list or kind is tuple:
        yield from _elements(value)
    elif kind is set or kind is frozenset:
        yield from ((None, each) for each in value)  # type: ignore[attr-defined]
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, Tensor):
        _try(kind)
        yield from _attributes(value, vars(value))
    else:
        yield from _reduced(value)


def _reduced(value: object) -> Iterator[_Part]:
    reduce = copyreg.dispatch_table.get(type(value))
    reduced: Any = reduce(value) if reduce else value.__reduce_ex__(5)
    if isinstance(reduced, str):
        _try(value)
        return
    make, arguments, state, elements, items, set_state = (*reduced, *[None] * 4)[:6]
    made_of = (make, *arguments, set_state)
    if any(each is type(value) for each in made_of):
        _try(type(value))
    names = {id(each): name for name, each in getattr(value, "__dict__", {}).items()}
    if isinstance(value, tuple):  # a named tuple: its elements are its arguments
        yield from _elements(value)
    for each in made_of:
        yield _attribute(names[id(each)]) if id(each) in names else None, each
    # An object with __slots__ has two dicts: its __dict__ and its slots.
    for each in state if type(state) is tuple and len(state) == 2 else (state,):
        if isinstance(each, dict):
            yield from _attributes(value, each)
        else:
            yield None, each
    yield from _elements(elements or ())
    yield from _items(items or ())


def _attributes(owner: object, attributes: Mapping[Any, object]) -> Iterator[_Part]:
    for name, value in attributes.items():
        if isinstance(owner, nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            yield from _attributes(owner, value)  # type: ignore[arg-type]
        else:
            yield _attribute(name), value


def _items(items: Any) -> Iterator[_Part]:
    for key, value in items:
        yield None, key
        yield _item(key), value


def _elements(elements: Any) -> Iterator[_Part]:
    return ((f"[{index}]", value) for index, value in enumerate(elements))


def _attribute(name: object) -> str:
    if not isinstance(name, str):
        return _item(name)
    if name.isidentifier():
        return f".{name}"
    # Children of nn.Sequential and nn.ModuleList are named "0", "1", …; of nn.ModuleDict, anything.
    return f"[{name}]" if name.isdecimal() else _item(name)


def _item(key: object) -> str:
    return f"[{json.dumps(key) if isinstance(key, str) else repr(key)}]"


# --- describe it ---------------------------------------------------------------------------------


def _line(place: _Place, error: Exception) -> str:
    verb = "holds" if place.is_inside else "is"
    what, remedy = _diagnosis(place.value, error)
    return (
        f"{place.path} {verb} {what}, which cannot be pickled{_reason(error)}; "
        f"{remedy}, {_ALTERNATIVE}"
    )


def _reason(error: Exception) -> str:
    """The error's first line in parentheses, unless it only repeats what cannot be pickled."""
    message = str(error).partition("\n")[0]
    if message.startswith(("cannot pickle", "Can't pickle", "Can't get local")):
        return ""
    return f" ({type(error).__name__}: {message})"


def _diagnosis(value: object, error: Exception) -> tuple[str, str]:
    """A description of the object, and what to do instead."""
    kind = type(value)
    if isinstance(value, type):
        return _definition("class", value), "write it as a class at the top level of a module"
    if inspect.isfunction(inspect.unwrap(value)):  # type: ignore[arg-type]
        remedy = "write it as a function (def) at the top level of a module"
        return _definition("function", value), remedy
    if str(_error(kind)) == str(error):
        remedy = "write the class at the top level of a module"
        return f"an object of {_definition('class', kind)}", remedy
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}", "import it at the top of the file that uses it"
    return _article(_kind_name(value)), "create it in on_fit_start, exclude it in __getstate__"


def _definition(word: str, value: Any) -> str:
    name: str = value.__qualname__
    if name.endswith("<lambda>"):
        return "a lambda"
    if "<locals>" in name:
        return f"the local {word} {name.rpartition('<locals>.')[2]}"
    return f"a {word} that {value.__module__} does not have under its name, {name}"


def _kind_name(value: object) -> str:
    kind = type(value)
    if isinstance(value, io.IOBase):
        return "open file"
    if kind.__module__ == "_thread" and kind.__qualname__ in ("lock", "RLock"):
        return "lock"
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
