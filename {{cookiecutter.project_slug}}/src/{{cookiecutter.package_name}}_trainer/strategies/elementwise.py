"""Whether an optimizer steps a part of what it is given as it steps the whole.

Where parameters are sliced, an optimizer must compute each element by itself; where each process
steps some of the parameters, each parameter by itself. This is tested by steps on small tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..data import randomness
from ..errors import ConfigurationError, one_line
from ..launch import collectives
from .sharded_optimizers import constructor_options

Cut = Literal["elements", "parameters"]
_Pair = tuple[Tensor, Tensor]  # a parameter, and its gradients of all steps

MARK = "is_elementwise"
"""An attribute of an optimizer or its class; True: it is not tested."""

_SHAPES = ((4, 6), (6, 5))
_SCALES = (1.0, 0.01, 30.0) * 4  # of the gradients of steps, since some optimizers clip
_RATE = 0.01  # a warm-up begins at 0
# Of the largest change and value: kernels may differ in the last bits.
_TOLERANCE, _LAST_BITS = 1e-3, 1e-6
_BEYOND = {
    "elements": "computes an element from others of its parameter, of which each process has a "
    "slice",
    "parameters": "computes a parameter from others, and each process steps some of them",
}


def check(optimizers: Iterable[Optimizer], cut: Cut, device: torch.device) -> None:
    """Check that optimizers can step slices, if there are several processes; all must call it.

    Args:
        optimizers: The user's, before their first step.
        cut: What each process steps: slices of parameters, or some of the parameters.
        device: Where to test.

    Raises:
        ConfigurationError: One line for each that cannot.
    """
    if collectives.world_size() == 1:
        return
    if lines := problems_of(optimizers, cut, device):
        raise ConfigurationError(lines)


def problems_of(optimizers: Iterable[Optimizer], cut: Cut, device: torch.device) -> list[str]:
    """One line for each optimizer that cannot step slices; see :func:`check`."""
    with randomness.kept():
        randomness.seed_sample(0)
        found = {type(each).__name__: _reason(each, cut, device) for each in optimizers}
    return [
        f"configure_optimizers gave {name}, which {reason}; use another, such as AdamW, or "
        f"strategy='ddp', or set {name}.{MARK} = True to train anyway"
        for name, reason in found.items()
        if reason
    ]


def _reason(optimizer: Optimizer, cut: Cut, device: torch.device) -> str:
    if getattr(optimizer, MARK, False):
        return ""
    for group in optimizer.param_groups:
        whole = [
            (torch.randn(shape).to(device), torch.randn(len(_SCALES), *shape).to(device))
            for shape in _SHAPES
        ]
        slices: list[list[_Pair]] = [[pair] for pair in whole]
        if cut == "elements":
            slices = [
                [half]
                for value, gradients in whole
                for half in zip(
                    value.view(-1).chunk(2), gradients.flatten(1).chunk(2, 1), strict=True
                )
            ]
        try:
            after = _stepped(optimizer, group, whole)
        except Exception as error:  # of any optimizer
            return f"cannot be tested on slices of parameters ({one_line(error)})"
        try:
            found = torch.cat([_stepped(optimizer, group, each) for each in slices])
        except Exception as error:
            return f"{_BEYOND[cut]} ({one_line(error)})"
        before = torch.cat([value.flatten() for value, _ in whole])
        changed, largest = (after - before).abs().max(), before.abs().max()
        # Written so that NaN is a difference.
        if not (found - after).abs().max() <= _TOLERANCE * changed + _LAST_BITS * largest:
            return _BEYOND[cut]
    return ""


def _stepped(optimizer: Optimizer, group: dict[str, Any], pairs: Sequence[_Pair]) -> Tensor:
    """All values after steps of an optimizer with the settings of a group of the user's."""
    parameters = [torch.nn.Parameter(value.clone()) for value, _ in pairs]
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if not settings.get("lr", _RATE):
        settings["lr"] = settings["lr"] + _RATE
    options = constructor_options(optimizer)
    made = type(optimizer)([{**settings, "params": parameters}], **options)
    for step, scale in enumerate(_SCALES):
        for parameter, (_, gradients) in zip(parameters, pairs, strict=True):
            # They have a direction in common, which some optimizers look for.
            parameter.grad = (gradients[step] + gradients[0]) * scale
            if isinstance(optimizer, torch.optim.SparseAdam):
                parameter.grad = parameter.grad.to_sparse(1)
        made.step()
    return torch.cat([each.detach().flatten() for each in parameters])
