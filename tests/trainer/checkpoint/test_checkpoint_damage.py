"""Checkpoints that somebody or something has changed are refused, and run no code."""

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer.checkpoint import state_file
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.errors import CheckpointError

from checkpoint_subject import STATE, frame, names, read, rewrite, save


class Payload:
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


Attack = Callable[[bytes, bytes], bytes]
# What a file of these bytes becomes by a payload.
ATTACKS: dict[str, Attack] = {
    "replaced": lambda data, payload: payload,
    "replaced at the same size": lambda data, payload: payload.ljust(len(data), b"."),
    "appended": lambda data, payload: data + payload,
    "prepended": lambda data, payload: payload + data,
    "truncated": lambda data, payload: data[:-1],
    "emptied": lambda data, payload: b"",
}


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        read(path)
    (line,) = raised.value.problems
    assert "\n" not in line
    assert line.startswith(str(path))
    return str(line)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_payload_in_any_file_is_refused_and_does_not_run(tmp_path: Path, attack: str) -> None:
    good, canary = save(tmp_path / "good"), tmp_path / "canary"
    assert "state.json" in names(good)
    assert len(names(good)) > 1
    for name in names(good):
        planted = tmp_path / "planted"
        shutil.copytree(good, planted)
        data = (planted / name).read_bytes()
        (planted / name).write_bytes(ATTACKS[attack](data, pickled(canary)))
        assert name in refused(planted) or "damaged" in refused(planted)
        assert not canary.exists()
        shutil.rmtree(planted)


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "model.pt", "x.safetensors.index.json", "more.safetensors"]
)
def test_an_added_file_is_refused(tmp_path: Path, name: str) -> None:
    path, canary = save(tmp_path), tmp_path / "canary"
    (path / name).write_bytes(pickled(canary))
    assert refused(path) == f"{path}: {name} was not written by training; not read"
    assert not canary.exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("__0_0.distcp", "was not written by training; not read"),
        (".metadata", "is missing"),  # hidden files count as none
    ],
)
def test_an_added_file_that_the_head_lists_is_refused_too(tmp_path, name, what):
    path, canary = save(tmp_path), tmp_path / "canary"
    (path / name).write_bytes(pickled(canary))
    data = (path / name).read_bytes()

    def add(content: Any) -> Any:
        content["head"]["files"][name] = [len(data), f"{zlib.crc32(data):08x}"]
        return content

    rewrite(path, add)
    assert refused(path) == f"{path}: {name} {what}"
    assert not canary.exists()


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
        ({"head": {**HEAD, "files": {"a": [1]}}, "state": {}}, "TypeError: StoredFile.__new__()"),
        ({"head": {**HEAD, "files": {"a": [-1, "0"]}}, "state": {}}, "size of a is -1, not a"),
        ({"head": {**HEAD, "files": {"a": [1, 0]}}, "state": {}}, "checksum of a is 0"),
        ({"head": {**HEAD, "step": -1}, "state": {}}, "step is -1, not a whole number from 0 to"),
        ({"head": {**HEAD, "step": True}, "state": {}}, "step is True, not a whole number"),
        ({"head": {**HEAD, "step": 1.0}, "state": {}}, "step is 1.0, not a whole number"),
        ({"head": {**HEAD, "world_size": 0}, "state": {}}, "world_size is 0, not a whole number"),
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
        pytest.param('{"a": {"~dtype": "load"}}', id="data type that is a function"),
        pytest.param('{"a": {"~dict": [[1]]}}', id="pair of one"),
        pytest.param('{"a": {"~dict": [[[], 1]]}}', id="key that is a list"),
        pytest.param('{"a": {"~counter": 5}}', id="counter of a number"),
        pytest.param("[" * 600 + "]" * 600, id="deep"),
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
    assert refused(path) == f"{path / 'state.json'}: written in format 3; this trainer reads 2"


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_no_flipped_bit_is_read(tmp_path: Path) -> None:
    path = save(tmp_path)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for byte in range(len(content)):
            bit = 8 * byte + byte % 8
            flip(file, bit)
            with pytest.raises(CheckpointError) as raised:
                Checkpoint(path).check_contents()
            (line,) = raised.value.problems
            assert line.startswith(str(path)), bit
            assert "\n" not in line
            file.write_bytes(content)
        Checkpoint(path).check_contents()


@pytest.mark.parametrize("name", ["state.json", "rank-00000.safetensors"])
def test_a_file_of_another_step_is_refused(tmp_path: Path, name: str) -> None:
    one, other = save(tmp_path, 1), save(tmp_path, 2, {**STATE, "epoch": 4, "model": {}})
    shutil.copy(one / name, other / name)
    with pytest.raises(CheckpointError):
        Checkpoint(other).check_contents()


def test_a_state_is_read_only_if_it_is_as_it_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / ".nfs000000000cf2a91c00000001").touch()  # left by NFS
    assert Checkpoint(path).state().keys() == STATE.keys()
    file = path / "rank-00000.safetensors"
    flip(file, 8 * (file.stat().st_size - 1))
    with pytest.raises(CheckpointError, match="its content has changed since it was saved"):
        Checkpoint(path).state()


def test_readers_share_the_files(tmp_path: Path) -> None:
    path = save(tmp_path)
    flip(path / "rank-00000.safetensors", 800)
    Checkpoint(path).check_contents(1, 2)  # the only file is the first reader's
    with pytest.raises(CheckpointError, match="its content has changed since it was saved"):
        Checkpoint(path).check_contents(0, 2)
