"""Gradients clipped in place: their norm over the whole model, or each value."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

from ..checkpoint import dtensors
from ..errors import Problems, nearest
from ..launch import collectives

ALGORITHMS = ("norm", "value")


def check(algorithm: str, problems: Problems) -> None:
    """Check ``gradient_clip_algorithm``.

    Args:
        algorithm: The name of the algorithm.
        problems: Collects one line per error.
    """
    if algorithm not in ALGORITHMS:
        known = nearest(algorithm, ALGORITHMS)
        problems.add(f"gradient_clip_algorithm={algorithm!r} is unknown{known}")


def clip_gradients(parameters: Sequence[Tensor], value: float, algorithm: str) -> None:
    """Clip the gradients of a model, of which each process has all, or its shards as DTensors.

    Args:
        parameters: without a gradient they are left out.
        value: largest norm, or largest value.
        algorithm: ``"norm"`` or ``"value"``.
    """
    if algorithm == "norm":
        clip_grad_norm_([_with_dense_gradient(each) for each in parameters], value)
    else:
        clip_grad_value_([_with_local_gradient(each) for each in parameters], value)


def clip_distinct_gradients(parameters: Sequence[Tensor], value: float, algorithm: str) -> None:
    """Clip gradients of which each process holds other ones: their norm over all, or each value.

    Args:
        parameters: whose gradients lie here; every process calls it, also one that has none.
        value: largest norm, or largest value.
        algorithm: ``"norm"`` or ``"value"``.
    """
    if algorithm == "value":
        clip_grad_value_(parameters, value)
        return
    gradients = [each.grad for each in parameters if each.grad is not None]
    own = get_total_norm(gradients).to(parameters[0].device)
    norm = collectives.all_reduce(own.float() ** 2).sqrt()
    clip_grads_with_norm_(parameters, value, norm)


def clip_finite_values(gradients: Iterable[Tensor], value: float) -> None:
    """Clip each value of those gradients that are finite.

    What has overflowed stays as it is, for an engine to see. The device decides that, and the host
    does not wait for it.
    """
    for gradient in gradients:
        bound = torch.where(torch.isfinite(gradient).all(), value, math.inf)
        gradient.clamp_(-bound, bound)


def _with_dense_gradient(parameter: Tensor) -> Tensor:
    """A tensor whose gradient is the values of a parameter's sparse one, for what takes no such."""
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    # A row may occur several times; its norm is that of their sum.
    parameter.grad = parameter.grad.coalesce()
    return _with_gradient(parameter.grad.detach().values())


def _with_local_gradient(parameter: Tensor) -> Tensor:
    """A tensor whose gradient is what lies here of a parameter's, sparse ones made dense."""
    if parameter.grad is not None and dtensors.is_sharded(parameter.grad):
        return _with_gradient(dtensors.local(parameter.grad))
    return _with_dense_gradient(parameter)


def _with_gradient(gradient: Tensor) -> Tensor:
    stand_in = gradient.new_empty(()).expand(gradient.shape)
    stand_in.grad = gradient
    return stand_in
