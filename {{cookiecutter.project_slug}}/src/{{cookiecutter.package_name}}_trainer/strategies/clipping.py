"""Clip gradients in place: by norm over the whole model, or by value."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from ..checkpoint import dtensors
from ..launch import collectives


def clip_gradients(
    parameters: Sequence[Tensor],
    value: float,
    algorithm: str,
    counts: Callable[[Tensor], bool] | None = None,
) -> Tensor | None:
    """Clip the gradients of a model, by global ``"norm"`` or by ``"value"``.

    ``counts``: if gradients differ between processes: whether this process adds a parameter to the
    norm, and not another one. Every process must then call this, even without parameters.

    Returns:
        The norm before clipping, on the device; by value ``None``. Infinity changes no gradient.
    """
    shards = [_with_local_gradient(parameter) for parameter in parameters]
    if algorithm == "value":
        clip_grad_value_(shards, value)
        return None
    counted = [
        shard.grad
        for shard, parameter in zip(shards, parameters, strict=True)
        if shard.grad is not None and (counts is None or counts(parameter))
    ]
    norm = get_total_norm(counted)
    if counts is not None:  # torch computes norms on one mesh only
        norm = collectives.all_reduce((norm.float() ** 2).to(parameters[0].device)).sqrt()
    if value < math.inf:
        clip_grads_with_norm_(shards, value, norm)
    return norm


def is_first_holder(parameter: Tensor) -> bool:
    """Whether this process is the first that holds its part of a parameter, perhaps a DTensor."""
    if dtensors.is_sharded(parameter):
        return dtensors.is_first_copy(parameter)
    return collectives.rank() == 0


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """A tensor whose gradient is a parameter's: its local shard, or the values of a sparse one."""
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        # A row may occur several times; the norm is that of the coalesced rows.
        parameter.grad = gradient = gradient.coalesce()
        gradient = gradient.detach().values()
    elif gradient is not None and dtensors.is_sharded(gradient):
        gradient = dtensors.local(gradient)
    else:
        return parameter
    stand_in = gradient.new_empty(()).expand(gradient.shape)
    stand_in.grad = gradient
    return stand_in
