"""The kernels of torch's SyncBatchNorm, which only GPUs have, for the emulated GPU.

Source: aten/src/ATen/native/cuda/Normalization.cuh
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _wide(x: Tensor) -> Tensor:
    """Half precision is computed in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([-1 if dim == 1 else 1 for dim in range(x.ndim)])


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_wide(x), _dims(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


def _gather_stats(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    shares = (counts / counts.sum()).to(means.dtype).unsqueeze(1)
    mean = (means * shares).sum(0)
    variances = inverses.pow(-2) - eps
    variance = ((variances + (means - mean).square()) * shares).sum(0)
    unbiased = variance * counts.sum() / (counts.sum() - 1)
    for running, new in ((running_mean, mean), (running_variance, unbiased)):
        if running is not None:
            running.mul_(1 - momentum).add_(momentum * new)
    return mean, torch.rsqrt(variance + eps)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    output = (_wide(x) - _by_channel(mean, x)) * _by_channel(inverse, x)
    if weight is not None:
        output = output * _by_channel(weight, x)
    if bias is not None:
        output = output + _by_channel(bias, x)
    return output.to(x.dtype)


def _backward_reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = _wide(gradient)
    total = own.sum(_dims(x))
    moved = (own * (_wide(x) - _by_channel(mean, x))).sum(_dims(x))
    dtype = mean.dtype if weight is None else weight.dtype
    return total, moved, (moved * inverse).to(dtype), total.to(dtype)


def _backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    total: Tensor,
    moved: Tensor,
    counts: Tensor,
) -> Tensor:
    centered = _wide(x) - _by_channel(mean, x)
    slope = _by_channel(moved / counts.sum() * inverse.square(), x)
    factor = inverse if weight is None else inverse * weight
    change = _wide(gradient) - _by_channel(total / counts.sum(), x) - centered * slope
    return (change * _by_channel(factor, x)).to(x.dtype)


KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.batch_norm_stats.default: _stats,
    _aten.batch_norm_gather_stats_with_counts.default: _gather_stats,
    _aten.batch_norm_elemt.default: _normalize,
    _aten.batch_norm_backward_reduce.default: _backward_reduce,
    _aten.batch_norm_backward_elemt.default: _backward,
}
