"""Matrix products of linear layers in float8, by torchao.

Weights stay parameters of the module in their data type, under their names: each forward and each
backward scales and casts them. So checkpoints, optimizers and exports are as without it.

Source: https://docs.pytorch.org/ao/stable/workflows/training.html (Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433)
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..errors import ConfigurationError, Problems, UserError
from ..memory import activation_checkpointing

_MULTIPLE = 16  # of both sizes of a layer: what the kernels of GPUs take
_CAPABILITY = (8, 9)


def check(names: Sequence[str], precision: str, problems: Problems) -> None:
    """Collect a line per error in the trainer's ``float8``, as far as possible without a model."""
    are_names = False
    with problems:
        activation_checkpointing.check_names(names, "float8")
        are_names = bool(names)
    if not are_names:
        return
    if importlib.util.find_spec("torchao") is None:
        problems.add("float8 needs torchao, which is not installed: pip install torchao")
    if not precision.startswith("bf16"):
        problems.add(
            f"float8 with precision={precision!r}: torchao tests it in bfloat16 only; use "
            "precision='bf16-mixed' or 'bf16-true'"
        )


def select(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """Select the linear layers that are in the named modules, or are named, each once.

    Layers are left out whose sizes are not multiples of 16, and subclasses of ``nn.Linear``.

    Raises:
        ConfigurationError: A name matches nothing in this model, or there is no such layer.
    """
    selected = activation_checkpointing.select(module, names, "float8")
    inside = {id(each): each for outer in selected for each in outer.modules()}
    linear = [each for each in inside.values() if type(each) is nn.Linear]
    found = [each for each in linear if not (each.in_features | each.out_features) % _MULTIPLE]
    if names and not found:
        raise ConfigurationError(
            f"float8={list(names)}: no nn.Linear in these modules has sizes that are multiples of "
            f"{_MULTIPLE}; name others, or leave it out"
        )
    return found


@contextlib.contextmanager
def applied(
    module: nn.Module, names: Sequence[str], device: torch.device
) -> Iterator[Sequence[str]]:
    """Compute layers in float8 in this context; gives notes.

    Args:
        names: As in :func:`select`.
        device: Without such kernels (a CPU), they are emulated, which is slow.

    Raises:
        UserError: This GPU has no float8.
    """
    if not names:
        yield []
        return
    emulates, layers = device.type == "cpu", select(module, names)
    if not emulates and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise UserError(
            f"float8: {torch.cuda.get_device_name(device)} has none: it needs compute capability "
            "8.9 (Ada, Hopper) or newer; leave it out"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for each in layers:
        twin = convert_to_float8_training(each, config=Float8LinearConfig(emulate=emulates))
        twin._parameters = each._parameters  # also those that a strategy puts in their places
        vars(each)["forward"] = twin.forward
    try:
        yield [f"float8: {len(layers)} linear layers{', emulated, which is slow' * emulates}"]
    finally:
        for each in layers:
            del vars(each)["forward"]
