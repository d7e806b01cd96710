"""Frozen parameters that a checkpoint omits: the code creates them again with the same values.

Instead, it has a string for each: its dtype, its shape and a checksum of some of its values.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigurationError
from ..launch import collectives
from . import dtensors

_VALUES = 64  # that are compared; more would copy a large model from its device


class LeftOut:
    """What checkpoints of a fit leave out; created before parameters are sharded."""

    def __init__(self, module: nn.Module) -> None:
        named = module.named_parameters(remove_duplicate=False)
        frozen = {name: param for name, param in named if not param.requires_grad}
        if meta := [name for name, param in frozen.items() if param.is_meta]:
            line = f"checkpoint_weights='trainable': {meta[0]} is frozen and on the meta device"
            raise ConfigurationError(f"{line}, so that a resume could not have it; use 'all'")
        self._texts = {name: _text(param) for name, param in frozen.items()}
        self._initial: dict[str, str] = {}

    def begin(self, module: nn.Module) -> None:
        """Record checksums of this rank's shards, before a checkpoint or user code changes them."""
        self._initial = self._held(module)

    def texts(self, module: nn.Module) -> dict[str, str]:
        """The strings of parameters that no rank has changed; all ranks must call it."""
        now, initial = self._held(module), self._initial
        differ = torch.tensor([float(now.get(name) != initial.get(name)) for name in self._texts])
        changed = collectives.all_reduce(differ, "max").tolist() if self._texts else []
        pairs = zip(self._texts.items(), changed, strict=True)
        return {name: text for (name, text), is_changed in pairs if not is_changed}

    def _held(self, module: nn.Module) -> dict[str, str]:
        return {  # a teacher that follows a network is frozen, too: all values are summed up
            name: f"{_text(local := dtensors.local(param))} {local.abs().sum(dtype=torch.float64)}"
            for name, param in module.named_parameters(remove_duplicate=False)
            if name in self._texts and not (param.requires_grad or param.is_meta)
        }


def _text(value: Tensor) -> str:
    flat = value.detach().flatten()
    some = flat[:: max(1, flat.numel() // _VALUES)].cpu()
    some = torch.view_as_real(some) if some.is_complex() else some
    return f"{value.dtype} {list(value.shape)} {zlib.crc32(some.double().numpy().tobytes()):08x}"


def check(module: nn.Module, model: Any, source: object) -> None:
    """Raise CheckpointError if a parameter that was left out has other values in the module."""
    for name, param in module.named_parameters(remove_duplicate=False):
        was = model.get(name) if isinstance(model, Mapping) else None  # damaged, or forged
        if isinstance(was, str) and not dtensors.is_sharded(param) and was != (now := _text(param)):
            problem = f"{name} was frozen and left out (checkpoint_weights='trainable')"
            other = f"the module gives another one: {was} then, {now} now"
            advice = "load the same pretrained weights in its __init__"
            raise CheckpointError(f"{source}: {problem}, and {other}; {advice}")
