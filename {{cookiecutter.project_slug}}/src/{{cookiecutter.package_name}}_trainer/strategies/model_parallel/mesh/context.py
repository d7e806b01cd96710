"""Context parallelism: each process of a group holds a slice of every sequence.

A sequence has two chunks per process; a slice is one from the head and its mirror image from the
tail. Keys and values of all slices are gathered in each attention. The backward of each operation
here is its adjoint over all processes: so gradients of parameters are those of the mean of all
processes' losses, and are averaged over this group like over replicas.
"""

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import scaled_dot_product_attention

from ....checkpoint import dtensors
from ....data import sequence
from ....errors import UserError
from ...base import Stage
from .refusals import first_order


class Context:
    """Slices of sequences in a group of processes (:class:`~...data.sequence.Slices`).

    Args:
        group: The processes, in the order of their slices.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._lengths: dict[int, int] = {}

    @contextlib.contextmanager
    def step(self, stage: Stage) -> Iterator[None]:
        """Context of a step, in which :mod:`~...data.sequence` splits sequences.

        Raises:
            UserError: The step has split none, so every process has computed the same.
        """
        self._lengths.clear()  # those of this step may have other lengths
        with sequence.sliced(self):
            yield
        if not self._lengths:
            raise UserError(
                f"strategy_options.context={self._size}: {stage}_step has split no sequence; call "
                "sequence.split on its inputs, or set context=1"
            )

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """This process' slice; see :func:`~...data.sequence.split`."""
        chunks = tensor.tensor_split(2 * self._size, dim)
        own = torch.cat([chunks[self._rank], chunks[-1 - self._rank]], dim)
        length, part = tensor.shape[dim], own.shape[dim]
        known = self._lengths.setdefault(part, length)
        if known != length:
            raise UserError(
                f"sequence.split: sequences of {known} and {length} positions in one step have "
                f"slices of the same length ({part}); pad them to one length"
            )
        return own

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole sequence; see :func:`~...data.sequence.gather`."""
        tensor, dim = dtensors.whole(tensor), dim % tensor.ndim
        chunks = self._chunks(tensor.shape[dim])
        longest = max(map(operator.add, chunks, reversed(chunks)))
        # Slices of equal lengths: zeros follow those that are shorter than the longest.
        shape = list(tensor.shape)
        shape[dim] = longest - shape[dim]
        own = torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()
        padded = first_order(all_gather_tensor_autograd(own, dim, self._group))
        slices, ranks = padded.split(longest, dim), range(self._size)
        heads = [slices[rank].narrow(dim, 0, chunks[rank]) for rank in ranks]
        tails = [
            slices[rank].narrow(dim, chunks[rank], chunks[-1 - rank]) for rank in reversed(ranks)
        ]
        return torch.cat([*heads, *tails], dim)

    def mean(self, values: Tensor, count: Tensor | int) -> Tensor:
        """The mean over all processes; see :func:`~...data.sequence.mean`."""
        values = dtensors.whole(values)
        sums = [values.sum(dtype=torch.float64), torch.as_tensor(count, device=values.device)]
        own = torch.stack([each.double() for each in sums])
        total, number = first_order(all_reduce(own, group=self._group))
        mean: Tensor = total / number
        return mean.to(values.dtype)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        *,
        is_causal: bool,
        **options: Any,
    ) -> Tensor:
        """Attention to the whole sequence; see :func:`~...data.sequence.attention`."""
        widths = [key.shape[-1], value.shape[-1]]
        key, value = self.gather(torch.cat([key, value], dim=-1), -2).split(widths, dim=-1)
        if not is_causal:
            return scaled_dot_product_attention(query, key, value, attn_mask, **options)
        if attn_mask is not None:
            raise ValueError("sequence.attention: give one of attn_mask and is_causal")
        chunks = self._chunks(query.shape[-2])
        ends = list(itertools.accumulate(chunks))
        attend = _lower_right if query.device.type == "cuda" else _masked
        head, tail = query.split_with_sizes([chunks[self._rank], chunks[-1 - self._rank]], -2)
        attended = [
            attend(each, key[..., :end, :], value[..., :end, :], **options)
            for each, end in ((head, ends[self._rank]), (tail, ends[-1 - self._rank]))
        ]
        return torch.cat(attended, dim=-2)

    def _chunks(self, own: int) -> list[int]:
        """Lengths of the chunks, in order, of the sequence of which this process has ``own``."""
        if own not in self._lengths:
            raise UserError(
                f"a slice of {own} positions belongs to no sequence that the step has split: call "
                "sequence.split on its inputs, and do not change the number of positions after it"
            )
        least, longer = divmod(self._lengths[own], 2 * self._size)
        return [least + (index < longer) for index in range(2 * self._size)]


def _masked(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Causal attention whose last query sees the last key."""
    positions = torch.arange(key.shape[-2], device=query.device)
    mask = positions <= positions[len(positions) - query.shape[-2] :, None]
    return scaled_dot_product_attention(query, key, value, mask, **options)


def _lower_right(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The same on GPUs: no mask is stored."""
    # Importing it imports torch's compiler, which takes seconds.
    from torch.nn.attention.bias import causal_lower_right

    device = query.device.type
    if torch.is_autocast_enabled(device):  # it calls the kernel, which autocast does not know
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bias: Any = causal_lower_right(query.shape[-2], key.shape[-2])
    return scaled_dot_product_attention(query, key, value, bias, **options)
