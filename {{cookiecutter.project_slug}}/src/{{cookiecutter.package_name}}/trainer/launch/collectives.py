"""Collectives that also work alone: with no process group, every value is already the result.

They work on the device of the tensor they are given. Nothing here pickles: what ranks tell one
another is tensors or JSON.
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
    """This process among its peers; 0 alone."""
    return dist.get_rank() if is_active() else 0


def world_size() -> int:
    """How many processes there are; 1 alone."""
    return dist.get_world_size() if is_active() else 1


def all_reduce(tensor: Tensor, how: How = "sum") -> Tensor:
    """Reduce over all processes into a new tensor of the same shape; alone, the tensor itself."""
    if world_size() == 1:
        return tensor
    operation = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(how, dist.ReduceOp.SUM)
    result = tensor.detach().clone()
    dist.all_reduce(result, operation)
    # gloo has no AVG, so a mean is a sum that is divided: the same on every backend.
    return result / world_size() if how == "mean" else result


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Every process' tensor, in the order of ranks; first dimensions may differ.

    Args:
        tensor: of at least one dimension; all but the first equal on every process.
        group: of all ranks; the default one if ``None``.
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
    """As :func:`all_gather`, of tensors of one shape; so the host waits for no lengths."""
    if world_size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor)
    return parts


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's JSON value, on every process."""
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
    """Every process' JSON value, in the order of ranks."""
    if world_size() == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(each.tolist())) for each in all_gather(text, group)]


def barrier() -> None:
    """Wait for every process."""
    # An all-reduce of a CPU tensor rather than dist.barrier(), which picks a device by itself.
    all_reduce(torch.zeros(1))
