"""1-bit Adam: after a warm-up, communicate only the signs of the momentum, with error feedback.

Source: Tang et al. 2021, 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
Convergence Speed, https://arxiv.org/abs/2102.02888, algorithm 1. The scale of the signs keeps the
2-norm, as in DeepSpeed's own implementation, which 0.19.7 has removed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...launch import collectives

_BITS = 8


class OneBitAdam(Optimizer):
    """Adam on averaged gradients at first; then Adam with fixed variance on compressed momentum.

    For ``freeze_step`` steps, gradients must be averaged. After that, each process must keep its
    own gradients (see :attr:`compresses`): it adds them to the momentum, sends signs and one scale
    per parameter, and adds the compression error to the next step. Weight decay is decoupled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "freeze_step": freeze_step, "betas": tuple(betas), "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.errors: dict[Tensor, CompressionErrors] = {}  # not in `state`: it is rank-local

    @property
    def compresses(self) -> bool:
        """Whether the next step needs each process' own gradients instead of averaged ones."""
        steps = [
            float(self.state[parameter]["step"]) >= group["freeze_step"]
            for group in self.param_groups
            for parameter in group["params"]
            if parameter in self.state
        ]
        return bool(steps) and all(steps)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step once; parameters without a gradient, the same on all processes, are left as is."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step(parameter, group)

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        gradient, momentum, variance = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        frozen = bool(state["step"] >= group["freeze_step"])
        state["step"] += 1  # of all, so that all are frozen at once
        if gradient is None:
            return
        momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
        if frozen:
            self._average(parameter, momentum)
        else:
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = momentum / (variance.sqrt() + group["eps"])
        if group["weight_decay"]:
            update += group["weight_decay"] * parameter
        parameter.sub_(group["lr"] * update)

    def _average(self, parameter: Tensor, momentum: Tensor) -> None:
        if collectives.world_size() > 1:
            if parameter not in self.errors:
                self.errors[parameter] = CompressionErrors(momentum)
            momentum.copy_(compressed_average(momentum, self.errors[parameter]))


class CompressionErrors:
    """Compression errors of a tensor: as sent by this process, and as averaged by it."""

    def __init__(self, tensor: Tensor) -> None:
        self.sent = tensor.new_zeros(tensor.numel())
        self.served = tensor.new_zeros(_lengths(tensor.numel())[collectives.rank()])


def compressed_average(tensor: Tensor, errors: CompressionErrors) -> Tensor:
    """Average compressed tensors over all processes; ``errors``, of earlier averages, are updated.

    Each process is responsible for one chunk: it receives the signs of that chunk and the scales of
    all processes, averages them, and sends the signs and the scale of the average to all.
    """
    world, rank = collectives.world_size(), collectives.rank()
    lengths, size = _lengths(tensor.numel()), _chunk(tensor.numel())
    corrected = tensor.flatten() + errors.sent
    signs, scale = _compress(corrected)
    errors.sent = corrected - _restore(signs, scale)

    packed = _pack(signs, size * world)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed)  # every process' bytes of this process' chunk
    sent = zip(received.chunk(world), collectives.all_gather_equal(scale), strict=True)
    parts = [_restore(_unpack(chunk, lengths[rank]), scale) for chunk, scale in sent]
    corrected = torch.stack(parts).mean(0) + errors.served
    signs, scale = _compress(corrected)
    errors.served = corrected - _restore(signs, scale)

    chunks = collectives.all_gather_equal(_pack(signs, size))
    served = zip(chunks, lengths, collectives.all_gather_equal(scale), strict=True)
    result = [_restore(_unpack(chunk, length), scale) for chunk, length, scale in served]
    return torch.cat(result).view_as(tensor)


def _chunk(numel: int) -> int:
    """Number of elements in a process' chunk, such that their signs fill whole bytes."""
    return -(-numel // (_BITS * collectives.world_size())) * _BITS


def _lengths(numel: int) -> list[int]:
    """Number of elements in each process' chunk; the last ones may be smaller or empty."""
    size = _chunk(numel)
    starts = [rank * size for rank in range(collectives.world_size())]
    return [min(max(numel - start, 0), size) for start in starts]


def _compress(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Which elements are not negative, and the scale with which the signs keep the norm."""
    return tensor >= 0, torch.linalg.vector_norm(tensor) / max(tensor.numel(), 1) ** 0.5


def _restore(positive: Tensor, scale: Tensor) -> Tensor:
    return torch.where(positive, scale, -scale)


def _pack(bits: Tensor, size: int) -> Tensor:
    """Pack eight bits into a byte, the first into the lowest bit; pad with zeros."""
    padded = torch.zeros(size, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    places = torch.arange(_BITS, dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, _BITS) << places).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, length: int) -> Tensor:
    places = torch.arange(_BITS, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> places & 1).flatten()[:length].bool()
