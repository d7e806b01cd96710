"""Sequences that several processes split among themselves (context parallelism).

Use these functions in a module that sets ``splits_sequences``. During a step under context
parallelism, each process holds a slice of every sequence: a chunk of its head and the mirror image
from its tail; lengths differ by one at most. In one process, and outside of a step, the slice is
the whole sequence, and each function is the plain operation.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Slices(Protocol):
    """The slices of a group of processes; a strategy implements it."""

    def split(self, tensor: Tensor, dim: int) -> Tensor: ...
    def gather(self, tensor: Tensor, dim: int) -> Tensor: ...
    def mean(self, values: Tensor, count: Tensor | int) -> Tensor: ...
    def attention(self, *args: Any, **kwargs: Any) -> Tensor: ...


class _Step:
    """The step that runs; its backward, maybe in threads of torch, sees it too."""

    slices: Slices | None = None


@contextlib.contextmanager
def sliced(slices: Slices | None) -> Iterator[None]:
    """Split sequences in this context; ``None``: every sequence stays whole."""
    before, _Step.slices = _Step.slices, slices
    try:
        yield
    finally:
        _Step.slices = before


def split(tensor: Tensor, dim: int) -> Tensor:
    """Take this process' slice of a sequence that every process of the group has.

    Split everything that has one entry per position: tokens, targets, position numbers, and the
    rows of an attention mask. ``dim`` is the dimension of positions.
    """
    return tensor if _Step.slices is None else _Step.slices.split(tensor, dim)


def gather(tensor: Tensor, dim: int) -> Tensor:
    """Join the slices of all processes: the inverse of :func:`split`, on every process."""
    return tensor if _Step.slices is None else _Step.slices.gather(tensor, dim)


def mean(values: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Compute the mean of values, such as losses, over all slices: the same on every process.

    ``count``: number of this process' values that count, by default all; the others must be zero,
    as ``cross_entropy(reduction="none")`` makes those of ignored targets. NaN if none counts.
    """
    if _Step.slices is None:
        return values.mean() if count is None else values.sum() / count
    return _Step.slices.mean(values, values.numel() if count is None else count)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Let this process' positions attend to those of all processes.

    The arguments are those of ``torch.nn.functional.scaled_dot_product_attention``. Of a sequence,
    ``query``, ``key`` and ``value`` are this process' slices, and the mask has the rows of its
    queries, or one row for all, and the columns of all keys.
    """
    attend: Any = scaled_dot_product_attention
    if _Step.slices is not None:
        attend = _Step.slices.attention
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    attended: Tensor = attend(query, key, value, attn_mask, is_causal=is_causal, **options)
    return attended
