"""Optimizers that DeepSpeed compiles, on machines that cannot: GPUs without nvcc are emulated."""

from typing import Any

import pytest
import torch
from my_project_trainer.strategies.deepspeed import extensions, optimizers
from torch import nn
from torch.utils import cpp_extension

from deepspeed_settings import problems

pytestmark = pytest.mark.needs("deepspeed")
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.fixture
def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)


def own(kind: str, zero: Any = None, **params: Any) -> dict[str, Any]:
    """A configuration with an optimizer of DeepSpeed's."""
    config = {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
    return config if zero is None else {**config, "zero_optimization": zero}


@pytest.mark.usefixtures("without_nvcc")
def test_deepspeed_s_own_adam_fails_on_a_gpu_without_nvcc(monkeypatch):
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with pytest.raises(Exception, match="CUDA_HOME"):
        FusedAdamBuilder().load()


@pytest.mark.usefixtures("without_nvcc")
@pytest.mark.parametrize("kind", ["Adam", "adamw"])
def test_torch_s_adam_is_used_on_a_gpu_without_nvcc(capsys, kind):
    config = own(kind, {"stage": 2}, bias_correction=True, adam_w_mode=False)
    found = extensions.compilable(config, "cuda")
    params = {"lr": 0.1, "adam_w_mode": False, "torch_adam": True}
    assert found == {**config, "optimizer": {"type": kind, "params": params}}
    assert capsys.readouterr().err == (
        f"note: torch's Adam instead of DeepSpeed's {kind}, whose compilation needs nvcc of "
        "torch's version of CUDA (CUDA_HOME)\n"
    )
    assert extensions.problems_of(config, "cuda") == []
    assert extensions.compilable(found, "cuda") is found


@pytest.mark.parametrize(("of_torch", "is_found"), [("13.0", True), ("12.6", False), (None, False)])
def test_nvcc_must_be_of_torch_s_version(tmp_path, monkeypatch, of_torch, is_found):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.48\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    monkeypatch.setenv("CXX", "true")
    found = extensions.compilable(own("Adam"), "cuda")
    assert (found == own("Adam")) == is_found


@pytest.mark.parametrize(
    ("config", "device_type", "is_kept"),
    [
        (own("AdamW", OFFLOAD), "cuda", False),
        (own("AdamW", {"stage": 2, "cpu_offload": True}), "cuda", False),
        (own("AdamW"), "cpu", False),
        (own("AdamW", torch_adam=True), "cpu", True),
        (own("Adagrad"), "cuda", True),
        (own("SGD", OFFLOAD), "cuda", True),
        ({}, "cuda", True),
    ],
)
def test_without_a_c_compiler(monkeypatch, config, device_type, is_kept):
    monkeypatch.setenv("CXX", "no-compiler -O3")
    assert (extensions.compilable(config, device_type) == config) == is_kept


def test_extensions_that_are_installed_need_no_compiler(monkeypatch):
    import deepspeed.git_version_info as installed

    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setitem(installed.installed_ops, "cpu_adam", True)
    monkeypatch.setattr(installed, "accelerator_name", "cuda")
    config = own("AdamW", OFFLOAD)
    assert extensions.compilable(config, "cuda") is config
    assert extensions.compilable(config, "cpu") != config


@pytest.mark.usefixtures("without_nvcc")
@pytest.mark.parametrize(
    ("config", "device_type", "what", "lacks"),
    [
        (own("Lion"), "cuda", "Lion in", "nvcc of torch's version"),
        (own("Lion"), "cpu", "Lion in", "a GPU, or offload_optimizer"),
        (own("Lion", OFFLOAD), "cuda", "Lion in", "a C++ compiler (no-compiler)"),
        (own("Adagrad", OFFLOAD), "cuda", "Adagrad in", "a C++ compiler (no-compiler)"),
        (own("Adam", bias_correction=False), "cpu", "Adam in", "a C++"),
    ],
)
def test_what_torch_does_not_have_is_refused(monkeypatch, config, device_type, what, lacks):
    if lacks.startswith("nvcc"):
        monkeypatch.setenv("CXX", "true")
    else:
        monkeypatch.setenv("CXX", "no-compiler")
    (line,) = extensions.problems_of(config, device_type)
    assert line.startswith(what)
    assert f"has to be compiled, which needs {lacks}" in line
    assert ("with bias_correction=False" in line) == (what == "Adam in")
    if device_type == "cpu":
        assert problems(config=config) == [line]


@pytest.mark.parametrize(("step", "other"), [(5, torch.tensor(5.0)), (torch.tensor(5.0), 5)])
def test_the_step_count_of_the_other_adam_is_loaded(step, other):
    kinds = {int: "deepspeed.ops.adam", torch.Tensor: torch.optim.AdamW.__module__}
    stored: Any = type("Stored", (torch.optim.AdamW,), {"__module__": kinds[type(other)]})
    parameter = nn.Parameter(torch.ones(2))
    optimizer = stored([parameter])
    optimizer.state[parameter] = {"step": step, "exp_avg": torch.zeros(2)}
    optimizers.convert_steps(optimizer)
    found = optimizer.state[parameter]["step"]
    assert type(found) is type(other)
    assert found == other
