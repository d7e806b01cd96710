"""Collectives over the process group. Without one, each value is already the result.

They run on the device of the given tensor or, if the process group has no backend for it, through
the host's memory. Nothing is pickled: ranks exchange tensors or JSON.
"""

import json
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

How = Literal["mean", "sum", "min", "max"]
# Backends of the process group: our variable takes precedence; the second is Lightning's.
BACKENDS = ("TRAINER_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND")
timeout_seconds = 600.0  # of the latest process group: if a rank does not join, its peers fail
compile_seconds = 0.0  # how long peers wait for a rank that compiles, beside it


def is_active() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if is_active() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of processes, of all or of a group; 1 without a process group."""
    return dist.get_world_size(group) if is_active() else 1


def teardown_may_hang() -> bool:
    """Whether destroying the process group would hang if only this rank has failed."""
    return world_size() > 1 and "nccl" in dist.get_backend_config()  # NCCL waits for all work


def all_reduce(tensor: Tensor, how: How = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce over all ranks into a new tensor of the same shape; on one rank, return ``tensor``."""
    if (size := world_size(group)) == 1:
        return tensor
    operation = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(how, dist.ReduceOp.SUM)
    result = _reduced_in_place(tensor.detach().clone(), operation, group)
    # gloo has no AVG, so compute the mean as a sum and a division: the same on every backend.
    return result / size if how == "mean" else result


def sum_in_place(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over a process group, by default of all ranks, into the tensor itself; return it."""
    return _reduced_in_place(tensor, dist.ReduceOp.SUM, group) if world_size(group) > 1 else tensor


def broadcast_in_place(tensor: Tensor, source: int = 0) -> None:
    """Overwrite the tensor with that of a rank."""
    carried = _carried(tensor)
    dist.broadcast(carried, source)
    if carried is not tensor:
        tensor.copy_(carried)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather the tensor of every rank, in rank order; the first dimension alone may differ."""
    if world_size() == 1:
        return [tensor]
    size = torch.tensor([tensor.shape[0]], device=tensor.device)
    lengths = [int(length) for length in all_gather_equal(size, group)]
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = all_gather_equal(padded, group)
    return [piece[:length] for piece, length in zip(parts, lengths, strict=True)]


def all_gather_equal(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Like :func:`all_gather`, for tensors of equal shape: the host need not wait for lengths."""
    if world_size() == 1:
        return [tensor]
    carried = _carried(tensor)
    gathered = [torch.empty_like(carried) for _ in range(world_size(group))]
    dist.all_gather(gathered, carried, group)
    return [received.to(tensor.device) for received in gathered]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return torch.stack(all_gather_equal(tensor.contiguous()))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return all_reduce(gradient)[rank()]


def stacked(tensor: Tensor) -> Tensor:
    """Stack the tensors of equal shape of all ranks, whose gradients for each are summed."""
    result: Tensor = _Stack.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast rank 0's JSON value to all ranks."""
    return gather(value if rank() == 0 else None, group)[0]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's JSON value, in rank order."""
    if world_size() == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(encoded.tolist())) for encoded in all_gather(text, group)]


def barrier() -> None:
    all_reduce(torch.zeros(1))  # not dist.barrier(), which selects a device itself


def _reduced_in_place(tensor: Tensor, how: Any, group: dist.ProcessGroup | None) -> Tensor:
    carried = _carried(tensor)
    dist.all_reduce(carried, how, group)
    return tensor if carried is tensor else tensor.copy_(carried)


def _carried(tensor: Tensor) -> Tensor:
    """The tensor, or its copy on the CPU if the process group has no backend for its device."""
    return tensor if f"{tensor.device.type}:" in dist.get_backend_config() else tensor.cpu()
