"""Clip gradients in place: by norm over the whole model, or by value."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from ..checkpoint import dtensors
from ..launch import collectives


def clip_gradients(parameters: Sequence[Tensor], value: float, algorithm: str) -> Tensor | None:
    """Clip the gradients of a model, which are replicated, or sharded as DTensors.

    ``algorithm``: ``"norm"`` or ``"value"``. As the other functions, it returns the norm before
    clipping, on the device; by value ``None``. An infinite norm changes no gradient.
    """
    if algorithm == "norm":
        dense = [_with_dense_gradient(each) for each in parameters]
        gradients = [each.grad for each in dense if each.grad is not None]
        return _bound_norm(dense, value, get_total_norm(gradients))
    clip_grad_value_([_with_local_gradient(each) for each in parameters], value)
    return None


def clip_distinct_gradients(
    parameters: Sequence[Tensor],
    value: float,
    algorithm: str,
    counts: Callable[[Tensor], bool] = lambda _: True,
) -> Tensor | None:
    """Clip gradients that differ between processes, by global norm or by value.

    Every process must call this, even without parameters. ``counts``: whether this process adds a
    parameter to the norm, and not another one. torch computes norms on one mesh only.
    """
    own = [_with_local_gradient(each) for each in parameters]
    if algorithm == "value":
        clip_grad_value_(own, value)
        return None
    counted = [each.grad for each, whole in zip(own, parameters, strict=True) if counts(whole)]
    squared = get_total_norm([each for each in counted if each is not None]).float() ** 2
    norm = collectives.all_reduce(squared.to(parameters[0].device)).sqrt()
    return _bound_norm(own, value, norm)


def _bound_norm(parameters: Sequence[Tensor], value: float, norm: Tensor) -> Tensor:
    """Scale gradients, whose norm is known, to a norm of at most ``value``; return the norm."""
    if value < math.inf:
        clip_grads_with_norm_(parameters, value, norm)
    return norm


def is_first_holder(parameter: Tensor) -> bool:
    """Whether this process is the first that holds its part of a parameter, perhaps a DTensor."""
    if dtensors.is_sharded(parameter):
        return dtensors.is_first_copy(parameter)
    return collectives.rank() == 0


def _with_dense_gradient(parameter: Tensor) -> Tensor:
    """A tensor whose dense gradient has the values of a parameter's sparse gradient."""
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    # A row may occur several times; the norm is that of the coalesced rows.
    parameter.grad = parameter.grad.coalesce()
    return _with_gradient(parameter.grad.detach().values())


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """A tensor whose gradient is the local shard of a parameter's gradient, made dense."""
    if parameter.grad is not None and dtensors.is_sharded(parameter.grad):
        return _with_gradient(dtensors.local(parameter.grad))
    return _with_dense_gradient(parameter)


def _with_gradient(gradient: Tensor) -> Tensor:
    stand_in = gradient.new_empty(()).expand(gradient.shape)
    stand_in.grad = gradient
    return stand_in
