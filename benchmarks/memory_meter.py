"""Readings of one rank's memory: resident, as the kernel counts it, and held by live tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def resident() -> float:
    """MiB of this process that are in memory now."""
    return _status("VmRSS:")


def peak() -> float:
    """Most MiB that were in memory since `forget_peak`."""
    return _status("VmHWM:")


def forget_peak() -> None:
    """Reset `peak` to what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {name} in /proc/self/status")


class LiveTensors:
    """Counts what tensors hold while optimizers step, each storage once.

    It hooks every optimizer in this process, an engine's inner ones too: before a step gradients
    are there, and after it the state. What an optimizer steps that is no part of the module is a
    copy of an engine's, and counts as optimizer state.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[str, dict[int, int]] = {
            "parameters": {},
            "gradients": {},
            "optimizer": {},
        }
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> dict[str, float]:
        """MiB of each kind."""
        for handle in self._handles:
            handle.remove()
        return {kind: sum(found.values()) / 2**20 for kind, found in self._found.items()}

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        own = list(self._module.parameters())
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._add("parameters", [getattr(each, "ds_tensor", each) for each in own])
        self._add("optimizer", stepped)
        self._add("gradients", [each.grad for each in (*own, *stepped) if each.grad is not None])

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            self._add("optimizer", [each for each in state.values() if isinstance(each, Tensor)])

    def _add(self, kind: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.detach().untyped_storage()
            if not any(storage.data_ptr() in found for found in self._found.values()):
                self._found[kind][storage.data_ptr()] = storage.nbytes()


def load_lazily_loaded() -> None:
    """Step a tiny model, which loads what torch loads at the first step: it is no part of a run."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
