"""Checkpoints: what goes in comes out, and nothing that is planted in one ever runs."""

import ast
import json
import os
import pickle
import shutil
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.project import PACKAGE, ROOT

from my_project.trainer.checkpoint import reading as checkpoints
from my_project.trainer.checkpoint import state_file
from my_project.trainer.checkpoint.writing import Checkpoints
from my_project.trainer.errors import CheckpointError

Checkpoint = checkpoints.Checkpoint

STATE = {"model": {"weight": torch.arange(6.0), "bias": torch.zeros(2)}, "epoch": 3}
OWN = {"random/torch": torch.arange(16, dtype=torch.uint8)}


def save(directory: Path, step: int = 1, state: Any = None, **options: Any) -> Path:
    """Save one checkpoint and give its directory."""
    writer = Checkpoints(directory, **options)
    writer.save(step, STATE if state is None else state, OWN)
    writer.close()
    return directory / f"step-{step:08d}"


def read(path: Path) -> Any:
    """Everything that can be read of a checkpoint."""
    found = Checkpoint(path)
    found.check_contents()
    found.own(0)
    return found.state()


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a checkpoint's state.json, under a checksum that is right."""
    content = change(json.loads((path / "state.json").read_text())["content"])
    frame(path, content if isinstance(content, str) else json.dumps(content))


def frame(path: Path, content: str) -> None:
    """Write a state.json around any content."""
    checksum = zlib.crc32(content.encode())
    text = f'{{"crc32": "{checksum:08x}", "content":\n{content}\n}}\n'
    (path / "state.json").write_text(text)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- round trips -----------------------------------------------------------------------------


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
    found = read(save(tmp_path, state={"value": value}))["value"]
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "number",
    [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, float("inf"), -float("inf"), float("nan")],
)
def test_a_float_comes_back_to_its_last_bit(tmp_path: Path, number: float) -> None:
    found = read(save(tmp_path, state={"value": [number]}))["value"][0]
    assert type(found) is float
    assert repr(found) == repr(number)


keys = st.text(max_size=5) | st.integers()
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
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
    found = read(save(tmp_path, state={"value": tensor}, asynchronous=asynchronous))["value"]
    assert found.dtype is tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.nan_to_num(7), tensor.nan_to_num(7))
    assert not found.requires_grad
    if tensor.is_floating_point():
        assert torch.equal(found.signbit(), tensor.signbit())


def test_tensors_that_share_memory_come_back(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    found = read(save(tmp_path, state={"embedding": tied, "head": tied, "half": tied[:2]}))
    assert found["embedding"].tolist() == found["head"].tolist() == [0, 1, 2, 3]
    assert found["half"].tolist() == [0, 1]


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
    found = Checkpoint(save(tmp_path))
    assert found.world_size == 1
    own = found.own(0)
    assert list(own) == ["random/torch"]
    assert torch.equal(own["random/torch"], OWN["random/torch"])
    assert found.own(1) == {}


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
        ({"a": torch.float32}, "state/a is a dtype"),
        ({"a": 1j}, "state/a is a complex"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_its_path(
    tmp_path: Path, state: Any, line: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        save(tmp_path, state=state)
    assert raised.value.problems == [
        f"{line}; a checkpoint supports numbers, text and tensors in dicts, lists and tuples"
    ]
    assert names(tmp_path) == []


@pytest.mark.parametrize("key", [(1, 2), b"bytes", Own()])
def test_a_key_that_cannot_be_carried_is_refused_with_its_path(tmp_path: Path, key: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^state/a"):
        save(tmp_path, state={"a": {key: 1}})


# --- writing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "kept"), [(0, [3, 4]), (1, [3, 4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    writer = Checkpoints(tmp_path, keep=keep)
    for step in range(1, 5):
        writer.save(step, {"step": step}, {})
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]
    assert checkpoints.complete(tmp_path) == sorted(tmp_path.iterdir())


def test_saving_over_a_step_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, {"value": 1, "tensor": torch.zeros(100)})
    path = save(tmp_path, 5, {"value": 2})
    assert read(path) == {"value": 2}
    assert names(tmp_path) == ["step-00000005"]


def test_what_a_killed_run_left_is_ignored_and_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for leftover in (".step-00000002.partial", ".step-00000001.pruned", ".step-00000001.replaced"):
        shutil.copytree(path, tmp_path / leftover)
    (tmp_path / "step-00000003").mkdir()  # without a state: not complete
    assert checkpoints.complete(tmp_path) == [path]
    assert checkpoints.resolve(tmp_path) == path
    Checkpoints(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_partial_checkpoint_of_the_same_step_is_written_anew(tmp_path: Path) -> None:
    partial = tmp_path / ".step-00000001.partial"
    partial.mkdir(parents=True)
    (partial / "junk.safetensors").write_text("junk")
    Checkpoints(tmp_path).save(1, STATE, OWN)
    assert read(tmp_path / "step-00000001")["epoch"] == 3


def test_a_save_that_failed_half_way_can_be_repeated(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path)
    partial = tmp_path / ".step-00000001.partial"
    partial.mkdir(parents=True)
    (partial / "rank-00000.safetensors").write_text("the beginning of a file")
    writer.save(1, STATE, OWN)
    assert read(tmp_path / "step-00000001")["epoch"] == 3


def test_asynchronous_files_equal_synchronous_ones(tmp_path: Path) -> None:
    state = {"tensors": [torch.ones(9), torch.tensor(1)], "numbers": [0.1, (1, 2)]}
    one, other = (
        save(tmp_path / "one", state=state),
        save(tmp_path / "other", state=state, asynchronous=True),
    )
    assert names(one) == names(other)
    assert (one / "state.json").read_bytes() == (other / "state.json").read_bytes()
    for file in one.glob("*.safetensors"):
        # The order of keys in a file's header is by chance; all else is not.
        found, wanted = load_file(other / file.name), load_file(file)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert file.stat().st_size == (other / file.name).stat().st_size


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
        found = read(path)
        assert found["tensor"].unique().tolist() == [step - 1]
        assert Checkpoint(path).own(0)["own"].unique().tolist() == [step - 1]
        assert len(found["numbers"]) == step


def test_waiting_is_over_when_the_checkpoint_is_whole(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, asynchronous=True)
    writer.save(1, STATE, OWN)
    writer.wait()
    assert read(tmp_path / "step-00000001")["epoch"] == 3
    writer.wait()
    writer.close()


# --- finding ---------------------------------------------------------------------------------


def test_resolve(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path / "run" / "checkpoints")
    for step in (9, 10):
        writer.save(step, {"step": step}, {})
    older, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints.resolve(tmp_path / "run") == newest
    assert checkpoints.resolve(str(tmp_path / "run" / "checkpoints")) == newest
    assert checkpoints.resolve(older) == older
    assert read(newest) == {"step": 10}


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_no_checkpoint_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no checkpoint")
    path = tmp_path / name
    with pytest.raises(CheckpointError) as raised:
        checkpoints.resolve(path)
    assert raised.value.problems == [
        f"{path}: no checkpoint there; give a run directory or a checkpoint in it"
    ]


# --- what somebody planted -------------------------------------------------------------------


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def pickled(canary: Path) -> bytes:
    """A payload, shown to work."""
    data = pickle.dumps(Payload(canary))
    pickle.loads(data)  # noqa: S301
    assert canary.is_dir()
    canary.rmdir()
    return data


def replace_with_pickle(file: Path, canary: Path) -> None:
    file.write_bytes(pickled(canary))


def replace_with_torch_save(file: Path, canary: Path) -> None:
    torch.save(Payload(canary), file)


def replace_at_the_same_size(file: Path, canary: Path) -> None:
    size, data = file.stat().st_size, pickled(canary)
    file.write_bytes(data.ljust(size, b"."))
    assert file.stat().st_size == size


def append(file: Path, canary: Path) -> None:
    file.write_bytes(file.read_bytes() + pickled(canary))


def prepend(file: Path, canary: Path) -> None:
    file.write_bytes(pickled(canary) + file.read_bytes())


def truncate(file: Path, canary: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path, canary: Path) -> None:
    file.write_bytes(b"")


def remove(file: Path, canary: Path) -> None:
    file.unlink()


Attack = Callable[[Path, Path], None]
ATTACKS: list[Attack] = [
    replace_with_pickle,
    replace_with_torch_save,
    replace_at_the_same_size,
    append,
    prepend,
    truncate,
    empty,
    remove,
]


def refused(path: Path) -> str:
    """The one line that refuses a checkpoint."""
    with pytest.raises(CheckpointError) as raised:
        read(path)
    (line,) = raised.value.problems
    assert "\n" not in line
    assert line.startswith(str(path))
    return str(line)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_payload_in_any_file_is_refused_and_does_not_run(tmp_path: Path, attack: Attack) -> None:
    good, canary = save(tmp_path / "good"), tmp_path / "canary"
    assert "state.json" in names(good)
    assert len(names(good)) > 1
    for name in names(good):
        planted = tmp_path / "planted"
        shutil.copytree(good, planted)
        attack(planted / name, canary)
        assert name in refused(planted) or "damaged" in refused(planted)
        assert not canary.exists()
        shutil.rmtree(planted)


@pytest.mark.parametrize(
    "name",
    [".metadata", "__0_0.distcp", "model.pt", "pytorch_model.bin", "x.safetensors.index.json"],
)
def test_an_added_file_is_refused(tmp_path: Path, name: str) -> None:
    path, canary = save(tmp_path), tmp_path / "canary"
    replace_with_pickle(path / name, canary)
    assert refused(path) == f"{path}: {name} was not written by training; not read"
    assert not canary.exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_an_added_file_that_the_head_lists_is_refused_too(tmp_path: Path, name: str) -> None:
    path, canary = save(tmp_path), tmp_path / "canary"
    replace_with_pickle(path / name, canary)
    data = (path / name).read_bytes()

    def add(content: Any) -> Any:
        content["head"]["files"][name] = [len(data), f"{zlib.crc32(data):08x}"]
        return content

    rewrite(path, add)
    assert refused(path) == f"{path}: {name} was not written by training; not read"
    assert not canary.exists()


def test_an_added_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    written = next(path.glob("*.safetensors"))
    shutil.copy(written, path / "more.safetensors")
    assert refused(path) == f"{path}: more.safetensors was not written by training; not read"


def test_a_missing_file_and_a_wrong_size_are_named(tmp_path: Path) -> None:
    path = save(tmp_path)
    written = next(path.glob("*.safetensors"))
    size = written.stat().st_size
    written.write_bytes(written.read_bytes() + b"more")
    assert refused(path) == (f"{path}: {written.name} has {size + 4} bytes, {size} were written")
    written.unlink()
    assert refused(path) == f"{path}: {written.name} is missing"


@pytest.mark.parametrize("text", ["", "null", "[]", "5", "{}", '{"head": {"format": 2,', "[" * 9])
def test_a_file_that_is_no_state_is_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path)
    (path / "state.json").write_text(text)
    assert refused(path) == f"{path / 'state.json'}: it is not a checkpoint's state"


HEAD = {"format": state_file.FORMAT, "step": 1, "world_size": 1, "files": {}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "KeyError: 'head'"),
        ([], "TypeError: list indices must be integers or slices, not str"),
        ({"head": HEAD}, "KeyError: 'state'"),
        ({"head": 5, "state": {}}, "TypeError: 'int' object is not subscriptable"),
        ({"head": {**HEAD, "files": 5}, "state": {}}, "AttributeError: 'int' object has no"),
        ({"head": {**HEAD, "files": {"a": [1]}}, "state": {}}, "TypeError: StoredFile.__init__()"),
        ({"head": {**HEAD, "files": {"a": [-1, "0"]}}, "state": {}}, "size of a is -1, not a"),
        ({"head": {**HEAD, "files": {"a": [1, 0]}}, "state": {}}, "checksum of a is 0"),
        ({"head": {**HEAD, "step": -1}, "state": {}}, "step is -1, not a whole number from 0 to"),
        ({"head": {**HEAD, "step": 10**20}, "state": {}}, f"step is {10**20}, not a whole number"),
        ({"head": {**HEAD, "step": True}, "state": {}}, "step is True, not a whole number"),
        ({"head": {**HEAD, "step": 1.0}, "state": {}}, "step is 1.0, not a whole number"),
        ({"head": {**HEAD, "world_size": 0}, "state": {}}, "world_size is 0, not a whole number"),
        ({"head": {**HEAD, "world_size": "x"}, "state": {}}, "world_size is 'x', not a whole"),
        ({"head": {**HEAD, "step": 2}, "state": {}}, "of step 2, not of the step that the"),
        ("[" * 100_000, "RecursionError: maximum recursion depth exceeded"),
        ("[" * 100_000 + "]" * 100_000, "RecursionError: maximum recursion depth exceeded"),
        ('{"head": {"format": 2,', "Expecting property name"),
    ],
)
def test_a_head_that_cannot_be_is_refused(tmp_path: Path, content: Any, reason: str) -> None:
    path = save(tmp_path)
    rewrite(path, lambda _: content)
    assert refused(path).startswith(f"{path / 'state.json'}: {reason}")


@pytest.mark.parametrize(
    "state",
    [
        pytest.param('{"a": {"~tensor": "state/none"}}', id="tensor that is not there"),
        pytest.param('{"a": {"~tensor": []}}', id="tensor without a name"),
        pytest.param('{"a": {"~tuple": 5}}', id="tuple of a number"),
        pytest.param('{"a": {"~dict": [[1]]}}', id="pair of one"),
        pytest.param('{"a": {"~dict": [[[], 1]]}}', id="key that is a list"),
        pytest.param('{"a": {"~counter": 5}}', id="counter of a number"),
        pytest.param("[" * 600 + "]" * 600, id="deep"),
        pytest.param("[" * 900 + "]" * 900, id="deeper"),
        pytest.param("5", id="no dict but a number"),
        pytest.param("[]", id="no dict but a list"),
    ],
)
def test_a_state_of_another_shape_is_refused(tmp_path: Path, state: str) -> None:
    path = save(tmp_path)
    head = json.loads((path / "state.json").read_text())["content"]["head"]
    frame(path, f'{{"head": {json.dumps(head)}, "state": {state}}}')
    refused(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    rewrite(path, lambda content: {**content, "head": {**content["head"], "format": 3}})
    line = f"{path / 'state.json'}: written in format {{}}; this trainer reads 2"
    assert refused(path) == line.format(3)
    (path / "state.json").write_text('{"head": {"format": 1, "world_size": 1, "files": {}}}')
    assert refused(path) == line.format(1)


# --- what has changed by itself ----------------------------------------------------------------


def flip(file: Path, bit: int) -> None:
    """Invert one bit of a file."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_no_flipped_bit_is_read(tmp_path: Path) -> None:
    path = save(tmp_path)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for byte in range(len(whole)):
            bit = 8 * byte + byte % 8
            flip(file, bit)
            with pytest.raises(CheckpointError) as raised:
                Checkpoint(path).check_contents()
            (line,) = raised.value.problems
            assert line.startswith(str(path)), bit
            assert "\n" not in line
            file.write_bytes(whole)
        Checkpoint(path).check_contents()


@pytest.mark.parametrize("name", ["state.json", "rank-00000.safetensors"])
def test_a_file_of_another_step_is_refused(tmp_path: Path, name: str) -> None:
    one, other = save(tmp_path, 1), save(tmp_path, 2, {**STATE, "epoch": 4, "model": {}})
    shutil.copy(one / name, other / name)
    with pytest.raises(CheckpointError):
        Checkpoint(other).check_contents()


def test_readers_share_the_files(tmp_path: Path) -> None:
    path = save(tmp_path)
    flip(path / "rank-00000.safetensors", 800)
    Checkpoint(path).check_contents(1, 2)  # the only file is the first reader's
    with pytest.raises(CheckpointError, match="its content has changed since it was saved"):
        Checkpoint(path).check_contents(0, 2)


# --- the sources -----------------------------------------------------------------------------

UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"torch.load", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load"}
# Collectives of torch.distributed that unpickle what another process sent.
OBJECTS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
}


def suspicious(tree: ast.AST) -> list[str]:
    """What in a source could run what it reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module in UNPICKLERS else []
            found += [each.name for each in node.names if each.name in OBJECTS]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
            safe = called == "torch.load" and keywords.get("weights_only") == "True"
            bad = called.split(".")[-1] in OBJECTS or called in RUNNERS | LOADERS
            found += [called] if bad and not safe else []
    return found


def test_nothing_in_the_sources_unpickles_or_runs_what_it_reads() -> None:
    sources = sorted((ROOT / "src").rglob("*.py"))
    assert len(sources) > 20
    found = {
        str(path.relative_to(ROOT)): suspicious(ast.parse(path.read_text())) for path in sources
    }
    assert {path: calls for path, calls in found.items() if calls} == {
        # What a process has pickled itself for those that it starts, and what they send back.
        f"src/{PACKAGE}/trainer/launch/functions.py": ["pickle"],
        # Writes only, to find out what cannot be.
        f"src/{PACKAGE}/trainer/launch/pickling.py": ["pickle"],
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from dill import loads", ["dill"]),
        ("torch.load(f)", ["torch.load"]),
        ("torch.load(f, weights_only=False)", ["torch.load"]),
        ("torch.load(f, weights_only=True)", []),
        ("eval(text)", ["eval"]),
        ("module.eval()", []),
        ("dist.all_gather_object(a, b)", ["dist.all_gather_object"]),
    ],
)
def test_the_search_finds(source: str, found: list[str]) -> None:
    assert suspicious(ast.parse(source)) == found
