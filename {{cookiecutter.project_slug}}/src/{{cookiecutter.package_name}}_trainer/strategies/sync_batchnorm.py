"""Synchronized BatchNorm: statistics of the whole batch, over all ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..launch import collectives


def convert(module: nn.Module, accelerator: str) -> nn.Module:
    """Synchronize every BatchNorm in a module over all ranks, in place; return the module.

    With ``accelerator="cuda"``, PyTorch's SyncBatchNorm is used, which does not run on the CPU.
    """
    kind = _FusedSyncBatchNorm if accelerator == "cuda" else SyncBatchNorm
    for layer in module.modules():
        # A SyncBatchNorm over a subgroup is kept, and raises its own error on the CPU.
        if isinstance(layer, _BatchNorm) and getattr(layer, "process_group", None) is None:
            layer.__class__ = kind  # references to it stay valid
    return module


class _FusedSyncBatchNorm(nn.SyncBatchNorm):
    """PyTorch's SyncBatchNorm, on GPUs; of an empty part of the batch, gradients are zero."""

    process_group = None

    def forward(self, input: Tensor) -> Tensor:
        if input.numel():
            return super().forward(input)
        # Other ranks exchange at least float32; torch would exchange half precision here.
        batch = input.to(torch.promote_types(input.dtype, torch.float32))
        # torch would leave out the gradients, for which peers may wait.
        zeros = sum(tensor.sum() for tensor in (batch, *self.parameters()))
        return (super().forward(batch) + zeros).to(input.dtype)


class SyncBatchNorm(_BatchNorm):
    """PyTorch's SyncBatchNorm for any device; without peers, a plain BatchNorm.

    The parts of the batch may differ in size, and may be empty on some ranks. Gradients of the
    parameters are those of this rank's part; the strategy averages them.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a part of the batch, of shape (N, C) or (N, C, ...)."""
        if not self.training or collectives.world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        # Like the fused kernels: input and output in half precision, sums in float32.
        batch = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [dim for dim in range(batch.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(batch.ndim)]
        values = batch.new_tensor([batch[:, 0].numel()])
        sums, count = _over_ranks(torch.cat([batch.sum(dims), values])).split([batch.shape[1], 1])
        if count < 2:
            needed = "at least 2 values per channel in training"
            raise ValueError(f"BatchNorm needs {needed}, not {int(count)}")
        mean = sums / count
        centered = batch - mean.view(shape)  # by the mean: E[x²] - E[x]² would lose precision
        variance = _over_ranks(centered.square().sum(dims)) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        output: Tensor = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape)
        if self.bias is not None:
            output = output + self.bias.view(shape)
        return output.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"BatchNorm takes 2 dimensions or more, not {input.ndim}")

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics with a batch's mean and unbiased variance."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean of all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1 - momentum).add_(new * momentum)


def _over_ranks(tensor: Tensor) -> Tensor:
    return _Sum.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


class _Sum(torch.autograd.Function):
    """A sum over all ranks, with gradients: each rank's loss depends on every rank's values."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return collectives.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _over_ranks(gradient)  # which has a gradient too
