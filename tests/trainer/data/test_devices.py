"""What ``devices=`` means, and how a batch gets to its device."""

import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from my_project_trainer.data import moving
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch import devices
from tests.project import PACKAGE, run

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
META = torch.device("meta")  # a second device that every machine has
Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (3, [0, 1, 2]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ("auto", [0, 1, 2, 3]),
        (None, [0, 1, 2, 3]),
        ([0], [0]),
        ("3,", [3]),
        ([1, 3], [1, 3]),
        ("1,3", [1, 3]),
        ("3,1", [3, 1]),
    ],
)
def test_a_value_means_these_of_four_devices(value: Any, indices: list[int]) -> None:
    assert devices.parse_devices(value, 4) == indices


@pytest.mark.parametrize(("value", "indices"), [("auto", [0]), (-1, [0]), (7, list(range(7)))])
def test_processes_on_a_cpu_can_be_made_up(value: Any, indices: list[int]) -> None:
    assert devices.parse_devices(value, None) == indices


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (0, "devices=0 is not a device; a run needs at least one"),
        ("0", "devices='0' may mean no device or device 0; say [0] for device 0"),
        ([], "devices=[] is not a device; a run needs at least one"),
        ([1, 1], "devices=[1, 1] names device 1 more than once"),
        ("0, 2, 2", "devices='0, 2, 2' names device 2 more than once"),
        (-2, "devices=-2: -2 is not a device; only -1 alone means all"),
        ([-1], "devices=[-1]: -1 is not a device; only -1 alone means all"),
        ([0, -1], "devices=[0, -1]: -1 is not a device; only -1 alone means all"),
        ([4], "devices=[4]: there is no device 4 here (known: 0 to 3)"),
        ("1, 9", "devices='1, 9': there is no device 9 here (known: 0 to 3)"),
        (5, "devices=5: there is no device 4 here (known: 0 to 3)"),
        (2.0, "devices=2.0: give a number, a list of indices, or 'auto'"),
        (True, "devices=True: give a number, a list of indices, or 'auto'"),
        ([True], "devices=[True]: give a number, a list of indices, or 'auto'"),
        ({0}, "devices={0}: give a number, a list of indices, or 'auto'"),
        ("", "devices='': give a number, a list of indices, or 'auto'"),
        ("two", "devices='two': give a number, a list of indices, or 'auto'"),
        ("1, x", "devices='1, x': give a number, a list of indices, or 'auto'"),
    ],
)
def test_a_refusal_names_the_value(value: Any, line: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        devices.parse_devices(value, 4)
    assert raised.value.problems == [line]


@pytest.mark.parametrize("value", ["auto", -1, "-1"])
def test_all_of_no_devices_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a device; a run needs at least one"):
        devices.parse_devices(value, 0)


def test_an_index_where_there_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no device 0 here \(known: none\)"):
        devices.parse_devices([0], 0)


@given(st.one_of(st.integers(-9, 9), st.text("0123456789-, ", max_size=6)))
def test_any_value_gives_devices_that_exist_or_is_refused(value: int | str) -> None:
    try:
        indices = devices.parse_devices(value, 4)
    except ConfigurationError:
        with pytest.raises(ConfigurationError, match=re.escape(f"devices={value!r}")):
            devices.parse_devices(value, 4)
    else:
        assert indices
        assert len(set(indices)) == len(indices)
        assert set(indices) <= {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["cpu", "auto"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_training_is_on_the_cpu(name: str) -> None:
    assert devices.choose_accelerator(name) == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="sees no GPU; use 'cpu' or 'auto'") as raised:
        devices.choose_accelerator(name)
    assert str(raised.value).startswith(f"accelerator={name!r}: torch {torch.__version__}")


def test_the_driver_is_asked_for_gpus_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv(_NVML_CHECK, raising=False)
    print_it = f"print(os.environ[{_NVML_CHECK!r}])"
    lines = ["import importlib, os", f"from {PACKAGE}_trainer.launch import devices", print_it]
    lines += [f"os.environ[{_NVML_CHECK!r}] = '0'", "importlib.reload(devices)", print_it]
    assert run(["-c", "; ".join(lines)], fresh=True).stdout.split() == ["1", "0"]


def test_an_unknown_accelerator_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        devices.choose_accelerator("gpus")
    assert str(raised.value) == "accelerator='gpus' is unknown; did you mean 'gpu'?"


def test_move_reaches_every_tensor_and_keeps_every_container() -> None:
    tensor = torch.ones(2)
    batch = {
        "pair": Pair(tensor, [tensor, (tensor, "text")]),
        "ordered": OrderedDict(first=tensor, second=None),
        3: ({"deep": [tensor]}, 7),
    }
    moved = moving.move(batch, META)
    assert type(moved) is dict
    assert list(moved) == ["pair", "ordered", 3]
    assert type(moved["pair"]) is Pair
    left, right = moved["pair"]
    assert (type(right), type(right[1])) == (list, tuple)
    assert type(moved["ordered"]) is OrderedDict
    assert right[1][1] == "text"
    assert moved["ordered"]["second"] is None
    assert moved[3][1] == 7
    tensors = (left, right[0], right[1][0], moved["ordered"]["first"], moved[3][0]["deep"][0])
    assert [leaf.device for leaf in tensors] == [META] * 5
    assert tensor.device.type == "cpu"


@dataclass(frozen=True)
class Images:
    """A batch of a user's."""

    pixels: torch.Tensor
    names: list[str]
    sizes: dict[str, torch.Tensor] = field(default_factory=dict, init=False)


def test_move_takes_a_dataclass() -> None:
    batch = Images(torch.ones(2), ["a", "b"])
    batch.sizes["width"] = torch.ones(2)
    moved = moving.move([batch], META, torch.float16)[0]
    assert (type(moved), moved.names) == (Images, ["a", "b"])
    tensors = [moved.pixels, moved.sizes["width"]]
    assert [(tensor.device, tensor.dtype) for tensor in tensors] == [(META, torch.float16)] * 2
    assert batch.pixels.device.type == batch.sizes["width"].device.type == "cpu"
    assert moving.move(Images, META) is Images


@pytest.mark.parametrize(("device", "non_blocking"), [(META, True), (torch.device("cpu"), False)])
def test_move_waits_only_for_what_goes_to_the_host(monkeypatch, device, non_blocking):
    asked, original = [], torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        asked.append(how["non_blocking"] if how else args[2])
        return original(self, *args, **how)

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    monkeypatch.setattr(torch.Tensor, "to", to)
    moving.move([torch.ones(2), packed], device)
    assert asked == [non_blocking] * 2


def test_move_casts_floating_point_numbers_and_no_others() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3), torch.randn(2)])
    words = torch.nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    plain = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.arange(2)]
    batch = [plain, {"mask": torch.ones(2) > 0, "signal": torch.ones(2) * 1j}, packed, words]
    for device in (META, torch.device("cpu")):
        half, rest, sequence, text = moving.move(batch, device, torch.float16)
        assert [tensor.dtype for tensor in half] == [torch.float16, torch.float16, torch.int64]
        assert [tensor.dtype for tensor in rest.values()] == [torch.bool, torch.complex64]
        assert (sequence.data.dtype, text.data.dtype) == (torch.float16, torch.int64)
        assert {tensor.device for tensor in (*half, *rest.values(), sequence.data)} == {device}


def test_move_uses_an_object_s_own_to() -> None:
    class Graph:
        def __init__(self) -> None:
            self.nodes = torch.ones(2)

        def to(self, device: torch.device) -> "Graph":
            self.nodes = self.nodes.to(device)
            return self

    assert moving.move([Graph()], META)[0].nodes.device == META


@pytest.mark.parametrize("batch", ["text", b"bytes", 1, 2.5, None, {1, 2}, [[], {}, ()]])
def test_move_leaves_what_is_no_tensor(batch: Any) -> None:
    assert moving.move(batch, META) == batch
