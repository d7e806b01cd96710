"""Checkpoints: what goes in comes out, and nothing that is planted in one ever runs."""

import shutil
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from my_project_trainer.checkpoint import reading as checkpoints
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.writing import Checkpoints
from my_project_trainer.errors import CheckpointError

from checkpoint_subject import OWN, names, read, save


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="None"),
        pytest.param(True, id="bool"),
        pytest.param(-(10**40), id="large int"),
        pytest.param("ü \n \0 ~tensor", id="text"),
        pytest.param([], id="empty list"),
        pytest.param((), id="empty tuple"),
        pytest.param({}, id="empty dict"),
        pytest.param({1: "one", -2: {3: [4]}, None: 0, False: 1.5, "s": 2}, id="keys"),
        pytest.param({"~tensor": "no tensor", "~": {"~dict": []}}, id="keys of our own"),
        pytest.param([(1, [2, (3,)]), {"deep": ({},)}], id="nested"),
        pytest.param(Counter({"a": 2, 5: 1}), id="Counter"),
        pytest.param([Counter()], id="empty Counter"),
    ],
)
def test_a_value_comes_back(tmp_path: Path, value: Any) -> None:
    restored = read(save(tmp_path, state={"value": value}))["value"]
    assert restored == value
    assert type(restored) is type(value)
    assert repr(restored) == repr(value)


keys = st.text(max_size=5) | st.integers()
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(keys, trees, max_size=3))
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert repr(read(save(tmp_path_factory.mktemp("tree"), state=tree))) == repr(tree)


TENSORS = {
    "float64": torch.tensor([1 / 3, float("nan"), -0.0], dtype=torch.float64),
    "float32": torch.tensor([[0.1, float("inf")], [-1.0, 2.0]]),
    "float16": torch.tensor([0.1, 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "int32": torch.tensor([-(2**31)], dtype=torch.int32),
    "int64": torch.tensor([2**63 - 1, -(2**63)]),
    "of no dimension": torch.tensor(7),
    "float of no dimension": torch.tensor(0.1),
    "empty": torch.empty(0),
    "empty of two dimensions": torch.empty(3, 0, dtype=torch.int64),
    "not contiguous": torch.arange(12.0).reshape(3, 4).t(),
    "a part of another": torch.arange(10.0)[4:6],
    "expanded": torch.ones(1).expand(4),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back(tmp_path: Path, name: str, asynchronous: bool) -> None:
    tensor = TENSORS[name]
    restored = read(save(tmp_path, state={"value": tensor}, asynchronous=asynchronous))["value"]
    assert restored.dtype is tensor.dtype
    assert restored.shape == tensor.shape
    assert torch.equal(restored.nan_to_num(7), tensor.nan_to_num(7))
    assert not restored.requires_grad
    if tensor.is_floating_point():
        assert torch.equal(restored.signbit(), tensor.signbit())


def test_tensors_that_share_memory_come_back(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    restored = read(save(tmp_path, state={"embedding": tied, "head": tied, "half": tied[:2]}))
    assert restored["embedding"].tolist() == restored["head"].tolist() == [0, 1, 2, 3]
    assert restored["half"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({1: torch.tensor(1), "1": torch.tensor(2)}, id="a number and its text"),
        pytest.param(
            {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}, id="a name with a slash"
        ),
    ],
)
def test_tensors_are_not_mixed_up_by_their_names(tmp_path: Path, state: Any) -> None:
    assert repr(read(save(tmp_path, state=state))) == repr(state)


def test_each_process_has_its_own_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save(tmp_path))
    assert checkpoint.world_size == 1
    rank_local = checkpoint.rank_local_state(0)
    assert list(rank_local) == ["random/torch"]
    assert torch.equal(rank_local["random/torch"], OWN["random/torch"])
    assert checkpoint.rank_local_state(1) == {}


def test_an_ordered_dict_comes_back_as_a_dict(tmp_path: Path) -> None:
    state = OrderedDict(b=1, a=OrderedDict(c=torch.ones(1)))
    assert repr(read(save(tmp_path, state=state))) == "{'b': 1, 'a': {'c': tensor([1.])}}"


class Own:
    pass


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"a": [1, {"b": Own()}]}, "state/a/1/b is a Own"),
        ({"a": (b"bytes",)}, "state/a/0 is a bytes"),
        ({1: {2: {3}}}, "state/1/2 is a set"),
        ({"a": print}, "state/a is a builtin_function_or_method"),
        ({"a": torch.device("cpu")}, "state/a is a device"),
        ({"a": 1j}, "state/a is a complex"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_its_path(tmp_path, state, line):
    with pytest.raises(CheckpointError) as raised:
        save(tmp_path, state=state)
    supported = "a checkpoint supports numbers, text and tensors in dicts, lists and tuples"
    assert raised.value.problems == [f"{line}; {supported}; leave it out of the state_dict"]
    assert names(tmp_path) == []


@pytest.mark.parametrize("key", [(1, 2), b"bytes", Own()])
def test_a_key_that_cannot_be_carried_is_refused_with_its_path(tmp_path: Path, key: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^state/a"):
        save(tmp_path, state={"a": {key: 1}})


@pytest.mark.parametrize(("keep", "kept"), [(0, [3, 4]), (1, [3, 4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    writer = Checkpoints(tmp_path, keep=keep)
    for step in range(1, 5):
        writer.save(step, {"step": step}, {})
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]
    assert run_directory.complete(tmp_path) == sorted(tmp_path.iterdir())


def test_saving_over_a_step_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, {"value": 1, "tensor": torch.zeros(100)})
    assert read(save(tmp_path, 5, {"value": 2})) == {"value": 2}
    assert names(tmp_path) == ["step-00000005"]


def test_what_a_killed_run_left_is_ignored_and_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for leftover in (".step-00000002.partial", ".step-00000001.pruned", ".step-00000001.replaced"):
        shutil.copytree(path, tmp_path / leftover)
    (tmp_path / "step-00000003").mkdir()  # without a state: not complete
    assert run_directory.complete(tmp_path) == [path]
    assert checkpoints.resolve(tmp_path) == path
    Checkpoints(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_asynchronous_writing_does_not_see_later_changes(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, asynchronous=True)
    tensor, numbers = torch.zeros(200_000), [1]
    for step in (1, 2, 3):
        writer.save(step, {"tensor": tensor, "numbers": numbers}, {"own": tensor})
        tensor += 1
        numbers.append(step)
    writer.close()
    for step in (2, 3):
        path = tmp_path / f"step-{step:08d}"
        restored = read(path)
        assert restored["tensor"].unique().tolist() == [step - 1]
        assert Checkpoint(path).rank_local_state(0)["own"].unique().tolist() == [step - 1]
        assert len(restored["numbers"]) == step


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_no_checkpoint_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no checkpoint")
    path = tmp_path / name
    with pytest.raises(CheckpointError) as raised:
        checkpoints.resolve(path)
    problem = f"{path}: no checkpoint there; give a run directory or a checkpoint in it"
    assert raised.value.problems == [problem]
