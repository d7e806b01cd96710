"""What cannot be pickled is found, and its path is one that Python can follow."""

import functools
import pickle
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from my_project_trainer.launch.pickling import find_unpicklable
from torch import nn
from torch.utils.data import DataLoader

OTHERWISE = ", or use strategy='ddp', which pickles nothing"


class Holder:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None:
        """To be bound."""


class Refuses:
    def __reduce__(self) -> tuple[object, ...]:
        raise ValueError("not on a Sunday\nnor on a Monday")


class Drops:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {}


def local_class() -> type:
    class Inner: ...

    return Inner


def local_object() -> object:
    return local_class()()


def module(child: object) -> nn.Module:
    made: Any = nn.Linear(1, 1)
    made.activation = child
    return made


def test_nothing_is_said_of_what_can_be_pickled() -> None:
    value = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Holder().method, Drops(), {1: "x"}]
    pickle.dumps(value)
    assert find_unpicklable(value, "model") is None


TO_DEFINE = "define it at the top level of a module, with def or class"
TO_START = "create it in on_fit_start, and exclude it in __getstate__"
KINDS = [
    (lambda: lambda: 0, f"is {__name__}.<lambda>.<locals>.<lambda>", TO_DEFINE),
    (local_class, f"is {__name__}.local_class.<locals>.Inner", TO_DEFINE),
    (local_object, f"is of type {__name__}.local_class.<locals>.Inner", TO_DEFINE),
    (lambda: (number for number in [1]), "is of type builtins.generator", TO_START),
    (threading.Lock, "is of type _thread.lock", TO_START),
    (Refuses, f"is of type {__name__}.Refuses", TO_START),
    (lambda: {lambda: 0}, "is of type builtins.set", TO_START),  # its elements have no path
]


@pytest.mark.parametrize(("make", "what", "remedy"), KINDS, ids=[kind[1] for kind in KINDS])
def test_a_kind_is_named_with_its_remedy(make, what, remedy):
    value = nn.Sequential(module(make()))
    why = " (ValueError: not on a Sunday)" if isinstance(value[0].activation, Refuses) else ""
    line = f"model[0].activation {what}, which cannot be pickled{why}; {remedy}{OTHERWISE}"
    assert find_unpicklable(value, "model") == line


# Each puts something into something else, and says how it is reached from there.
STEPS = {
    "attribute of a module": lambda inner: (module(inner), ".activation"),
    "attribute": lambda inner: (Holder(before=1, of=inner), ".of"),
    "list": lambda inner: ([1, "x", inner], "[2]"),
    "tuple": lambda inner: ((inner, inner), "[0]"),
    "dict": lambda inner: ({1: 2, "a": [3], 'b "c"': inner}, '["b \\"c\\""]'),
    "dict by number": lambda inner: ({7: inner}, "[7]"),
    "partial's argument": lambda inner: (functools.partial(print, 1, inner), ".args[1]"),
    "method": lambda inner: (Holder(of=inner).method, ".__self__.of"),
    "sequential": lambda inner: (nn.Sequential(nn.ReLU(), module(inner)), "[1].activation"),
    "named sequential": lambda inner: (
        nn.Sequential(OrderedDict(first=nn.ReLU(), second=module(inner))),
        ".second.activation",
    ),
    "module dict": lambda inner: (nn.ModuleDict({"a-b": module(inner)}), '["a-b"].activation'),
    "loader's data set": lambda inner: (DataLoader(Holder(of=inner), sampler=[1]), ".dataset.of"),
}
LEAVES = [lambda: lambda: 0, threading.Lock, lambda: (x for x in ())]


@given(st.lists(st.sampled_from(list(STEPS)), max_size=6), st.sampled_from(LEAVES))
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


def test_circles_are_gone_round_once():
    model: Any = nn.Sequential(nn.ReLU())
    model.owner = Holder(model=model, again=[model])
    assert find_unpicklable(model, "model") is None
    model[0].register_module("last", module(lambda: 0))
    line = find_unpicklable(model, "model")
    assert line is not None
    assert ".last.activation is " in line


def test_of_tensors_the_attributes_alone_are_read(monkeypatch):
    layer: Any = nn.Linear(1, 1)
    for kind in (torch.Tensor, nn.Parameter):
        monkeypatch.setattr(kind, "__reduce_ex__", lambda *_: pytest.fail("read"))
    layer.weight.tag = lambda: 0
    line = find_unpicklable(layer, "model")
    assert line is not None
    assert line.startswith("model.weight.tag is ")
