"""BatchNorm over the parts of all ranks together, as if one process had the whole batch.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..launch import collectives


def convert(module: nn.Module, accelerator: str) -> nn.Module:
    """Have every BatchNorm in a module normalize over all ranks.

    Parameters and buffers stay the objects that they are, under their names. Call it on every rank,
    and before the module is wrapped.

    Args:
        module: is changed in place.
        accelerator: that it will run on. PyTorch's own SyncBatchNorm, which ``"cuda"`` takes, does
            not run on the CPU.

    Returns:
        the module; another only where it is itself a BatchNorm that goes to a GPU.
    """
    if accelerator == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    for each in module.modules():
        # One that its user synchronizes among some ranks only is left to say that it cannot be.
        if isinstance(each, _BatchNorm) and getattr(each, "process_group", None) is None:
            # The object stays, and so do its hooks, and whoever else holds it.
            each.__class__ = SyncBatchNorm
    return module


class SyncBatchNorm(_BatchNorm):
    """PyTorch's, on any device that a process group can reduce; alone, plain BatchNorm.

    Parts may differ in size, down to none on some ranks. Gradients of the parameters are of this
    rank's part, as any other layer's: to add them up is left to the strategy.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a part of the batch, of shape (N, C) or (N, C, ...).

        Raises:
            ValueError: fewer than two dimensions, or fewer than two values a channel in all.
        """
        if not self.training or collectives.world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        # As the fused kernels do: half precision comes in and goes out, sums are in float32.
        part = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [dim for dim in range(part.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(part.ndim)]
        values = part.new_tensor([part[:, 0].numel()])
        sums, count = _over_ranks(torch.cat([part.sum(dims), values])).split([part.shape[1], 1])
        if count < 2:
            raise ValueError(f"BatchNorm needs 2 values a channel to train on, not {int(count)}")
        mean = sums / count
        # The mean first: the square's mean less the mean's square would lose the digits of both.
        centered = part - mean.view(shape)
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
        """Move the running statistics towards a batch's, whose variance is the unbiased one."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # the mean of all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1 - (momentum or 0.0)).add_(new * (momentum or 0.0))


def _over_ranks(tensor: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(tensor)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """A sum over all ranks; each rank's loss depends on every rank's values."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return collectives.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return collectives.all_reduce(gradient)
