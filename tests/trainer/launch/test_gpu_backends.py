"""What a run sets in torch's GPU backends: on CPUs nothing, on GPUs for as long as it lasts."""

import importlib.util
import os
from typing import Any

import my_project_trainer as trainer
import pytest
import test_lineage
import torch
from my_project_trainer.launch import devices
from my_project_trainer.options import Options

from fitting import quiet


def settings() -> tuple[Any, ...]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer interface has been used, and contradicts it
        older = "unreadable"
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return (
        older,
        *(backend.fp32_precision for backend in backends),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.conv.fp32_precision,
    )


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    """Whatever a test does, torch is left as it was."""
    before = settings()
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert settings() == before


@pytest.mark.parametrize(
    ("options", "precision", "benchmark"),
    [
        ({}, "high", False),
        ({"matmul_precision": "highest"}, "highest", False),
        ({"matmul_precision": "medium", "cudnn_benchmark": False}, "medium", False),
        ({"deterministic": True}, "high", False),
        ({"cudnn_benchmark": True}, "high", True),
    ],
)
def test_on_gpus_it_is_set_and_put_back(options, precision, benchmark):
    before = settings()
    with devices.backends_set("cuda", Options(**options)):
        values = settings()
        assert (values[0], values[3]) == (precision, benchmark)
        assert torch.backends.cuda.matmul.allow_tf32 is (precision != "highest")
        assert values[4] == before[4]  # convolutions stay as torch has them
        if precision == "highest":  # the same in both of torch's interfaces
            assert values[1] == "ieee"
    assert settings() == before


def test_it_is_put_back_after_an_error():
    before = settings()
    with pytest.raises(KeyError), devices.backends_set("cuda", Options()):
        raise KeyError
    assert settings() == before


@pytest.mark.parametrize("newer", ["ieee", "tf32"])
def test_what_the_program_has_set_itself_stays_unless_the_option_says_otherwise(newer):
    torch.backends.cuda.matmul.fp32_precision = newer
    before = settings()
    with devices.backends_set("cuda", Options()):
        assert settings()[:3] == before[:3]
    with devices.backends_set("cuda", Options(matmul_precision="medium")):
        assert torch.get_float32_matmul_precision() == "medium"
    assert settings() == before


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("option", [None, False, True])
def test_cudnn_tunes_only_where_the_option_or_the_program_says_so(monkeypatch, before, option):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with devices.backends_set("cuda", Options(cudnn_benchmark=option)):
        assert torch.backends.cudnn.benchmark is (before if option is None else option)
    assert torch.backends.cudnn.benchmark is before


@pytest.mark.parametrize(
    ("built_for", "variables", "settings"),
    [
        ("13.0", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("13.0", {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}, None),
        ("13.0", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
        (None, {}, None),
    ],
)
def test_memory_of_gpus_grows_in_segments_unless_the_user_says_otherwise(
    monkeypatch, built_for, variables, settings
):
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for name in names:
        # Not delenv alone: it would not restore a variable that was not set.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    spec = importlib.util.find_spec(devices.__name__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # as each process imports it
    environment = {name: os.environ[name] for name in names if name in os.environ}
    assert environment == (variables if settings is None else settings)


def test_the_older_interface_counts_too():
    torch.set_float32_matmul_precision("medium")
    with devices.backends_set("cuda", Options()):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "medium"


def test_less_than_float32_is_said_on_gpus_alone():
    line = "float32 matrix products in TF32 (matmul_precision 'highest': in float32)"
    with devices.backends_set("cuda", Options()):
        assert devices.precision_notes("cuda", "32-true") == [line]
        assert devices.precision_notes("cuda", "bf16-mixed") == []
        assert devices.precision_notes("cpu", "32-true") == []
    with devices.backends_set("cuda", Options(matmul_precision="highest")):
        assert devices.precision_notes("cuda", "32-true") == []


def test_a_run_on_cpus_changes_nothing(tmp_path):
    class Looks(test_lineage.Model):
        def on_fit_start(self) -> None:
            seen.append(settings())

    seen: list[Any] = []
    before = settings()
    quiet(max_steps=1, default_root_dir=tmp_path, matmul_precision="medium").fit(Looks())
    assert seen == [before]


def test_a_run_is_within_what_its_arguments_say(tmp_path, monkeypatch):
    asked = []
    applied = devices.backends_set

    def as_on_a_gpu(device_type: str, options: Any) -> Any:
        asked.append(device_type)
        return applied("cuda", options)

    class Looks(test_lineage.Model):
        def on_fit_start(self) -> None:
            seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))

    seen: list[Any] = []
    monkeypatch.setattr(trainer.trainer, "backends_set", as_on_a_gpu)
    quiet(max_steps=1, default_root_dir=tmp_path).fit(Looks())
    assert (asked, seen) == (["cpu"], [("high", False)])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"matmul_precision": "hihg"},
            "matmul_precision='hihg': expected Literal['highest', 'high', 'medium'] | None",
        ),
        (
            {"cudnn_benchmark": True, "deterministic": True},
            "cudnn_benchmark=True with deterministic=True: which algorithm is fastest differs from "
            "run to run, and so do the last bits; leave cudnn_benchmark out",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(options, line):
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(accelerator="cpu", max_steps=1, **options)
    assert raised.value.problems == [line]
