"""Optimizers that DeepSpeed compiles for its configuration; torch's Adam where it cannot."""

import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...launch import collectives
from . import settings

_FUSED = {"adam": "fused_adam", "adamw": "fused_adam", "lion": "fused_lion"}
_OFFLOADED = {"adam": "cpu_adam", "adamw": "cpu_adam", "adagrad": "cpu_adagrad", "lion": "cpu_lion"}
# Parameters that torch's Adam does not have: it always corrects the bias, and the engine resets
# gradients.
_ONLY_DEEPSPEED = {"bias_correction", "set_grad_none"}


def _params(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return settings.section(settings.section(config, "optimizer"), "params")


def _required(config: Mapping[str, Any]) -> str:
    """Name of the extension of the configuration's optimizer; empty if nothing is compiled."""
    if _params(config).get("torch_adam"):
        return ""
    zero = settings.section(config, "zero_optimization")
    device = settings.section(zero, "offload_optimizer").get("device")
    is_offloaded = device == "cpu" or bool(zero.get("cpu_offload"))  # the older spelling
    kind = settings.kind(config, "optimizer") or ""
    return (_OFFLOADED if is_offloaded else _FUSED).get(kind.lower(), "")


def _lacking(extension: str, device_type: str) -> str:
    """What is missing to compile an extension; empty if nothing is, or if it is installed."""
    from deepspeed.git_version_info import accelerator_name, installed_ops
    from torch.utils import cpp_extension

    if installed_ops.get(extension) and accelerator_name == device_type:
        return ""
    if extension == "fused_lion" and device_type == "cpu":
        return "a GPU, or offload_optimizer"
    compiler = cpp_extension.get_cxx_compiler().split()[0]
    found = {
        f"a C++ compiler ({compiler})": shutil.which(compiler) is not None,
        "Python's headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
        "torch's headers": Path(cpp_extension.include_paths()[0]).is_dir(),
    }
    if device_type != "cpu" and extension in _FUSED.values():
        found["nvcc of torch's version of CUDA (CUDA_HOME)"] = _has_nvcc()
    return next((name for name, is_found in found.items() if not is_found), "")


def _has_nvcc() -> bool:
    from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version

    try:
        major, _ = installed_cuda_version()
    except MissingCUDAException:
        return False
    return str(major) == (torch.version.cuda or "").split(".")[0]


def problems_of(config: Mapping[str, Any], device_type: str) -> list[str]:
    """One line for an optimizer that cannot be compiled, and that torch does not have.

    Call it after DeepSpeed is imported for this type of device.
    """
    extension, corrects = _required(config), _params(config).get("bias_correction", True)
    lacks = _lacking(extension, device_type) if extension else ""
    if not lacks or (extension.endswith("_adam") and corrects):
        return []
    what = f"{settings.kind(config, 'optimizer')} in the DeepSpeed configuration"
    return [
        f"{what}{'' if corrects else ' with bias_correction=False'} has to be compiled, which "
        f"needs {lacks}; install it, or use AdamW"
    ]


def compilable(config: dict[str, Any], device_type: str) -> dict[str, Any]:
    """The configuration, with torch's Adam if a rank cannot compile DeepSpeed's; a collective."""
    extension = _required(config)
    if not extension:
        return config
    lacks = _lacking(extension, device_type)
    if not collectives.all_reduce(torch.tensor([float(bool(lacks))]), "max").item():
        return config
    named, missing = settings.kind(config, "optimizer"), lacks or "what another rank lacks"
    note = f"note: torch's Adam instead of DeepSpeed's {named}, whose compilation needs {missing}"
    if collectives.rank() == 0:
        print(note, file=sys.stderr, flush=True)
    params = {key: each for key, each in _params(config).items() if key not in _ONLY_DEEPSPEED}
    params["torch_adam"] = True
    return {**config, "optimizer": {**config["optimizer"], "params": params}}
