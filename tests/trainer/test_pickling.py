"""What cannot be pickled is found, and its path is one that Python can follow."""

import functools
import io
import pickle
import sqlite3
import threading
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from my_project_trainer.launch.pickling import find_unpicklable
from torch import nn
from torch.utils.data import DataLoader

OTHERWISE = ", or use strategy='ddp', which pickles nothing"
Pair = namedtuple("Pair", "left right")


class Holder:
    """Has whatever attributes it is given."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None:
        """To be bound."""


class Slotted:
    __slots__ = ("slot",)

    def __init__(self, slot: object) -> None:
        self.slot = slot


class Reduced:
    """Pickles as a call of its class, with its attribute as the argument."""

    def __init__(self, inside: object) -> None:
        self.inside = inside

    def __reduce__(self) -> tuple[object, ...]:
        return Reduced, (self.inside,)


class Refuses:
    def __reduce__(self) -> tuple[object, ...]:
        raise ValueError("not on a Sunday\nnor on a Monday")


class Drops:
    """Leaves out what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {}


class Endless:
    """Its state holds another one, created each time."""

    def __getstate__(self) -> dict[str, object]:
        return {"next": Endless()}


def renamed() -> None:
    """No longer what the module has under this name."""


original = renamed
renamed = functools.cache(original)  # type: ignore[assignment]


def local_function():
    def inner() -> None: ...

    return inner


def local_class():
    class Inner: ...

    return Inner


def local_object():
    return local_class()()


def open_file(mode: str = "r"):
    return Path(__file__).open(mode)


def module(child: object) -> nn.Module:
    """A module that has something as an attribute."""
    made = nn.Linear(1, 1)
    made.activation = child
    return made


FINE = [
    lambda: None,
    lambda: {"a": [1, (2.0, b"3")], 4: {5, "6"}},
    lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    lambda: torch.ones(3, requires_grad=True) * 2,
    lambda: np.ones((3, 3)).T[::2],
    lambda: DataLoader([1, 2, 3], batch_size=2),  # type: ignore[arg-type]
    lambda: Holder().method,
    lambda: functools.partial(print, 1, end=""),
    lambda: io.BytesIO(b"x"),
    Drops,
    lambda: [Slotted(1), Reduced(2), Pair(3, 4), Path("x"), len, "".join, threading.Thread, Holder],
]


@pytest.mark.parametrize("make", FINE)
def test_nothing_is_said_of_what_can_be_pickled(make):
    value = make()
    pickle.dumps(value)
    assert find_unpicklable(value, "model") is None


TO_DEFINE = "define it at the top level of a module, with def or class"
TO_START = "create it in on_fit_start, and exclude it in __getstate__"
KINDS = [
    (lambda: lambda: 0, f"is {__name__}.<lambda>.<locals>.<lambda>", TO_DEFINE),
    (local_function, f"is {__name__}.local_function.<locals>.inner", TO_DEFINE),
    (lambda: original, f"is {__name__}.renamed", TO_DEFINE),
    (local_class, f"is {__name__}.local_class.<locals>.Inner", TO_DEFINE),
    (local_object, f"holds {__name__}.local_class.<locals>.Inner", TO_DEFINE),
    (lambda: (each for each in [1]), "is of type builtins.generator", TO_START),
    (open_file, "is of type _io.TextIOWrapper", TO_START),
    (threading.Lock, "is of type _thread.lock", TO_START),
    (lambda: sqlite3.connect(":memory:"), "is of type sqlite3.Connection", TO_START),
    (lambda: types, "is of type builtins.module", TO_START),
    (Refuses, f"is of type {__name__}.Refuses", TO_START),
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("make", "what", "remedy"), KINDS, ids=[each[1] for each in KINDS])
def test_a_kind_is_named_with_its_remedy(make, what, remedy):
    value = nn.Sequential(module(make()))
    why = " (ValueError: not on a Sunday)" if isinstance(value[0].activation, Refuses) else ""
    assert find_unpicklable(value, "model") == (
        f"model[0].activation {what}, which cannot be pickled{why}; {remedy}{OTHERWISE}"
    )


# Each puts something into something else, and says how it is reached from there.
STEPS = {
    "attribute of a module": lambda inner: (module(inner), ".activation"),
    "attribute": lambda inner: (Holder(before=1, of=inner), ".of"),
    "slot": lambda inner: (Slotted(inner), ".slot"),
    "list": lambda inner: ([1, "x", inner], "[2]"),
    "tuple": lambda inner: ((inner, inner), "[0]"),
    "namedtuple": lambda inner: (Pair(0, inner), "[1]"),
    "dict": lambda inner: ({1: 2, "a": [3], 'b "c"': inner}, '["b \\"c\\""]'),
    "dict by number": lambda inner: ({7: inner}, "[7]"),
    "ordered dict": lambda inner: (OrderedDict(a=1, b=inner), '["b"]'),
    "default dict": lambda inner: (defaultdict(list, a=inner), '["a"]'),
    "deque": lambda inner: (deque([1, inner]), "[1]"),
    "partial's argument": lambda inner: (functools.partial(print, 1, inner), ".args[1]"),
    "partial's keyword": lambda inner: (functools.partial(print, end=inner), '.keywords["end"]'),
    "method": lambda inner: (Holder(of=inner).method, ".__self__.of"),
    "sequential": lambda inner: (nn.Sequential(nn.ReLU(), module(inner)), "[1].activation"),
    "named sequential": lambda inner: (
        nn.Sequential(OrderedDict(first=nn.ReLU(), second=module(inner))),
        ".second.activation",
    ),
    "module list": lambda inner: (nn.ModuleList([module(inner)]), "[0].activation"),
    "module dict": lambda inner: (nn.ModuleDict({"a-b": module(inner)}), '["a-b"].activation'),
    "loader's data set": lambda inner: (
        DataLoader(Holder(of=inner), 2, sampler=[1]),
        ".dataset.of",
    ),
    "loader's collate": lambda inner: (
        DataLoader([1], collate_fn=functools.partial(print, inner)),  # type: ignore[arg-type]
        ".collate_fn.args[0]",
    ),
}
LEAVES = [lambda: lambda: 0, threading.Lock, local_function, lambda: (x for x in ())]


@given(st.lists(st.sampled_from(list(STEPS)), max_size=8), st.sampled_from(LEAVES))
def test_a_leaf_is_found_by_its_path(names, make):
    leaf = value = make()
    path = ""
    for name in names:
        value, step = STEPS[name](value)
        path = step + path
    line = find_unpicklable(value, "model")
    assert line is not None
    assert line.startswith(f"model{path} is ")
    assert eval(f"model{path}", {"model": value}) is leaf  # noqa: S307
    assert line.endswith(OTHERWISE)
    assert "\n" not in line


def test_what_has_no_path_is_said_of_what_holds_it():
    held = [{lambda: 0}, {(lambda: 0): 1}, filter(lambda x: x, [1]), Reduced(lambda: 0)]
    for value in held:
        line = find_unpicklable(Holder(of=[value]), "model")
        assert line.startswith("model.of[0] holds ")
        assert "<lambda>, which cannot be pickled" in line


def test_an_array_of_objects_and_a_tensor_s_attributes_are_looked_into():
    array = Holder(of=np.array([1, lambda: 0], dtype=object))
    assert find_unpicklable(array, "data").startswith("data.of holds ")
    layer = nn.Linear(1, 1)
    layer.weight.tag = lambda: 0
    assert find_unpicklable(layer, "model").startswith("model.weight.tag is ")
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: None)
    assert find_unpicklable(layer, "model").startswith("model._forward_hooks[")


def test_an_object_s_own_reason_is_told():
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(1, 1))
    line = find_unpicklable(nn.Sequential(parametrized), "model")
    assert line.startswith("model[0] is of type torch.nn.utils.parametrize.ParametrizedLinear, ")
    assert "(RuntimeError: Serialization of parametrized modules" in line


def test_of_several_paths_the_shortest_is_named():
    dataset = Holder(transform=lambda x: x)
    owner = Holder(deep=[[[[dataset]]]], loader=DataLoader(dataset, 2, sampler=[1]))
    assert find_unpicklable(owner, "model").startswith("model.loader.dataset.transform is ")


def test_circles_are_gone_round_once():
    model = nn.Sequential(nn.ReLU())
    model.owner = Holder(model=model, again=[model])
    model.owner.itself = model.owner
    assert find_unpicklable(model, "model") is None
    model[0].register_module("last", module(lambda: 0))
    assert find_unpicklable(model, "model").startswith("model[0].last.activation is ")


def test_a_search_without_an_end_is_given_up():
    assert find_unpicklable(Endless(), "data") is None
    assert find_unpicklable([Endless(), lambda: 0], "data").startswith("data[1] is ")


def test_the_numbers_of_tensors_are_not_read(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.activation = lambda x: x
    for kind in (torch.Tensor, nn.Parameter):
        monkeypatch.setattr(kind, "__reduce_ex__", lambda *_: pytest.fail("read"))
    assert find_unpicklable(model, "model").startswith("model.activation is ")
