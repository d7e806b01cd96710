"""Locate a parameter's elements in ZeRO's flat tensors in this process.

Stages 1 and 2 flatten the parameters of a group into one tensor, of which each process has a slice.
Stage 3 slices each parameter, and concatenates the slices. ``deepspeed.utils`` has such look-ups,
but they gather on every process, without step counts, and not before the first step.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.stored_tensors import Stored, flat_part


@dataclass(frozen=True)
class Slice:
    """The position of a part of a parameter, of ``length`` elements, perhaps none.

    It begins at ``start`` in ``flat``, which the optimizer steps, and ``offset`` in the parameter.
    """

    flat: Tensor
    start: int
    offset: int
    length: int

    def within(self, tensor: Tensor) -> Tensor:
        """The part, in a tensor with the shape of ``flat``."""
        return tensor.narrow(0, self.start, self.length)

    def cut(self, whole: Tensor | Stored) -> Tensor:
        """The part, in a full parameter; no more of a stored one is read."""
        return flat_part(whole, self.offset, self.length)


class _Slices:
    """What the slices of all stages of DeepSpeed's optimizer ``zero`` have in common.

    ``flats``: this process' flat parameters, one for each group. ``are_offloaded``: gradients are
    copied to the CPU, where the optimizer steps.
    """

    def __init__(self, zero: Any, flats: Sequence[Any], are_offloaded: bool) -> None:
        self._zero, self._flats, self.are_offloaded = zero, flats, are_offloaded

    def shape(self, parameter: Any) -> torch.Size:
        """Shape of the full parameter; stage 3 keeps it beside the parameter."""
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def gradients(self) -> Iterable[Tensor]:
        """This process' shard of the averaged gradients of a step, to modify in place."""
        if self.are_offloaded:
            return [flat.grad for flat in self._flats]
        return chain.from_iterable(self._zero.averaged_gradients.values())

    def forget_gradients(self) -> None:
        """Reset gradients after a step: DeepSpeed would reuse them for unused parameters."""
        if self.are_offloaded:
            for flat in self._flats:
                flat.grad.zero_()

    def finish_accumulation(self) -> None:
        """Finish a step's last backward: DeepSpeed would omit parameters that it did not use."""
        if self.are_offloaded:
            self._zero.finalize_gradient_accumulation_boundary()

    def has_whole(self, parameter: Any) -> bool:
        """Whether this process has a whole parameter now."""
        return True

    def take_weights(self) -> None:
        """Take over what user code has changed in parameters: the optimizer steps copies."""

    def keep_gathered(self) -> None:
        """Keep what a hook has changed in parameters that a forward may free before a step."""

    def relink(self) -> None:
        """Rebuild DeepSpeed's own look-up after the optimizer state was replaced, if it has one."""


class FlatSlices(_Slices):
    """Slices in ZeRO stages 1 and 2, in which every process holds all weights."""

    def __init__(self, zero: Any) -> None:
        super().__init__(zero, zero.single_partition_of_fp32_groups, bool(zero.cpu_offload))
        self._groups = {
            id(parameter): index
            for index, group in enumerate(zero.bit16_groups)
            for parameter in group
        }

    def of(self, parameter: Any) -> Slice | None:
        """The slice of a parameter; ``None`` if it is not trained."""
        if id(parameter) not in self._groups:
            return None
        flat = self._flats[self._groups[id(parameter)]]
        found = parameter._hp_mapping
        if found is None:
            return Slice(flat, 0, 0, 0)
        here, there = found.hp_fragment_address, found.lp_fragment_address
        return Slice(flat, here.start, there.start, here.numel)

    @torch.no_grad()
    def take_weights(self) -> None:
        rank, parts = torch.distributed.get_rank(), self._zero.parallel_partitioned_bit16_groups
        for flat, part in zip(self._flats, parts, strict=True):
            flat.copy_(part[rank])

    def forget_gradients(self) -> None:
        super().forget_gradients()
        if self.are_offloaded:
            for accumulated in self._zero.accumulated_grads_in_cpu.values():
                accumulated.zero_()

    def finish_accumulation(self) -> None:
        if self._zero.partition_gradients:
            super().finish_accumulation()

    def relink(self) -> None:
        self._zero._hp_optimizer_states_linked = False


class ParameterSlices(_Slices):
    """Slices in ZeRO stage 3, in which every process holds a part of each parameter."""

    def __init__(self, zero: Any, parameters: Sequence[Any]) -> None:
        super().__init__(zero, zero.fp32_partitioned_groups_flat, bool(zero.offload_optimizer))
        self._parameters = parameters

    def of(self, parameter: Any) -> Slice | None:
        """The slice of a parameter; ``None`` if it is not trained."""
        place = self._zero.grad_position.get(self._zero.get_param_id(parameter))
        if place is None:
            return None
        index, start, _ = place
        offset, length = _part(parameter)
        return Slice(self._flats[index], start, offset, length)

    def weights(self, parameter: Any) -> Slice:
        """The slice from which forward passes gather a parameter, trained or not."""
        offset, length = _part(parameter)
        return Slice(parameter.ds_tensor.data.view(-1), 0, offset, length)

    def has_whole(self, parameter: Any) -> bool:
        status = getattr(parameter, "ds_status", None)  # none of a buffer
        return status is None or status.name != "NOT_AVAILABLE"

    @torch.no_grad()
    def keep_gathered(self) -> None:
        for parameter in filter(self.has_whole, self._parameters):  # small ones, between steps
            weights = self.weights(parameter)
            weights.within(weights.flat).copy_(weights.cut(parameter.data))

    @torch.no_grad()
    def take_weights(self) -> None:
        self.keep_gathered()
        for parameter in self._parameters:
            weights, stepped = self.weights(parameter), self.of(parameter)
            if stepped is not None:
                stepped.within(stepped.flat).copy_(weights.within(weights.flat))

    def forget_gradients(self) -> None:
        self._zero.grad_partitions_flat_buffer.zero_()
        super().forget_gradients()


def _part(parameter: Any) -> tuple[int, int]:
    """First element and length of this process' part; the last parts are padded or empty."""
    size = parameter.partition_numel()
    offset = min(size * torch.distributed.get_rank(), parameter.ds_numel)
    return offset, min(size, parameter.ds_numel - offset)


def clip_finite(gradients: Iterable[Tensor], value: float) -> None:
    """Clip gradients by value, but those that overflowed, which the engine is to detect."""
    for gradient in gradients:
        # On the device, without synchronization with the host.
        bound = torch.where(torch.isfinite(gradient).all(), value, math.inf)
        gradient.clamp_(-bound, bound)
