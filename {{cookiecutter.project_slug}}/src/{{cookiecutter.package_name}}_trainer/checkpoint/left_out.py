"""Frozen parameters that a checkpoint leaves out: the code gives them again, with the same values.

In the place of each stands a text with its type, its shape and a checksum of some of its values.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError, ConfigurationError
from . import dtensors

_VALUES = 64  # that are compared; more would copy a large model from its device


def marks(module: nn.Module) -> dict[str, str]:
    """The texts of all frozen parameters, by each of their names; before they are sharded.

    Raises:
        ConfigurationError: One is on the meta device, so that only a checkpoint can give it.
    """
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name: each for name, each in named if not each.requires_grad}
    for name in (name for name, each in frozen.items() if each.is_meta):
        raise ConfigurationError(
            f"checkpoint_weights='trainable': {name} is frozen and on the meta device, so that a "
            "resume could not have it; use 'all'"
        )
    return {name: _mark(each) for name, each in frozen.items()}


def _mark(value: Tensor) -> str:
    flat = value.detach().flatten()
    some = flat[:: max(1, flat.numel() // _VALUES)].double().cpu().numpy()
    return f"{value.dtype} {list(value.shape)} {zlib.crc32(some.tobytes()):08x}"


def check(module: nn.Module, model: Any, source: object) -> None:
    """Raise CheckpointError if a parameter that was left out has other values in the module."""
    for name, each in module.named_parameters(remove_duplicate=False):
        was = model.get(name) if isinstance(model, Mapping) else None  # damaged, or forged
        if isinstance(was, str) and not dtensors.is_sharded(each) and was != _mark(each):
            raise CheckpointError(
                f"{source}: {name} was frozen and left out (checkpoint_weights='trainable'), and "
                f"the module gives another one: {was} then, {_mark(each)} now; load the same "
                "pretrained weights in its __init__"
            )
