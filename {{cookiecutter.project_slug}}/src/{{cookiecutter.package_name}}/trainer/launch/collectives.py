"""Collectives that also work without a process group: each value is then already the result.

They run on the device of the given tensor. Nothing is pickled: ranks exchange tensors or JSON.
"""

import json
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

How = Literal["mean", "sum", "min", "max"]


def is_active() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if is_active() else 0


def world_size() -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size() if is_active() else 1


def all_reduce(tensor: Tensor, how: How = "sum") -> Tensor:
    """Reduce over all ranks into a new tensor of the same shape; on one rank, return ``tensor``."""
    if world_size() == 1:
        return tensor
    operation = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(how, dist.ReduceOp.SUM)
    result = tensor.detach().clone()
    dist.all_reduce(result, operation)
    # gloo has no AVG, so compute the mean as a sum and a division: the same on every backend.
    return result / world_size() if how == "mean" else result


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather the tensor of every rank, in rank order; first dimensions may differ.

    Args:
        tensor: Of at least one dimension; all dimensions but the first are equal on every rank.
        group: Process group of all ranks; default: the default group.
    """
    if world_size() == 1:
        return [tensor]
    size = torch.tensor([tensor.shape[0]], device=tensor.device)
    sizes = [torch.zeros_like(size) for _ in range(world_size())]
    dist.all_gather(sizes, size, group)
    lengths = [int(each) for each in sizes]
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def all_gather_equal(tensor: Tensor) -> list[Tensor]:
    """Like :func:`all_gather`, for tensors of equal shape: the host need not wait for lengths."""
    if world_size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor)
    return parts


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast rank 0's JSON value to all ranks."""
    if world_size() == 1:
        return value
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0, group=group)
    if rank() != 0:
        text = torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=0, group=group)
    return json.loads(bytes(text.tolist()))


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's JSON value, in rank order."""
    if world_size() == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(each.tolist())) for each in all_gather(text, group)]


def barrier() -> None:
    """Wait for all ranks."""
    # All-reduce a CPU tensor instead of calling dist.barrier(), which selects a device itself.
    all_reduce(torch.zeros(1))
