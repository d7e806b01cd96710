"""Where ZeRO keeps what of a parameter in this process.

Stages 1 and 2 flatten the parameters of a group into one tensor and give each process a slice of
it. Stage 3 slices each parameter by itself, and lines up these slices. What is here is what
``deepspeed.utils.safe_get_full_fp32_param`` and its like look up; these gather on every process,
know no step counts, and nothing before the first step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Where a part of a parameter lies.

    Args:
        flat: the tensor that the optimizer steps, in one dimension.
        start: first element in it.
        offset: which element of the parameter that is.
        length: elements; 0 where this process steps none of the parameter.
    """

    flat: Tensor
    start: int
    offset: int
    length: int

    def within(self, tensor: Tensor) -> Tensor:
        """The part, in a tensor of the shape of ``flat``."""
        return tensor.narrow(0, self.start, self.length)

    def cut(self, whole: Tensor) -> Tensor:
        """The part, of a whole parameter."""
        return whole.reshape(-1).narrow(0, self.offset, self.length)


class FlatSlices:
    """Of ZeRO's stages 1 and 2, in which every process holds all weights.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._groups = {
            id(parameter): index
            for index, group in enumerate(zero.bit16_groups)
            for parameter in group
        }

    def of(self, parameter: Any) -> Slice | None:
        """A parameter's; ``None`` for one that is not trained."""
        if id(parameter) not in self._groups:
            return None
        flat = self._zero.single_partition_of_fp32_groups[self._groups[id(parameter)]]
        found = parameter._hp_mapping
        if found is None:
            return Slice(flat, 0, 0, 0)
        here, there = found.hp_fragment_address, found.lp_fragment_address
        return Slice(flat, here.start, there.start, here.numel)

    def shape(self, parameter: Tensor) -> torch.Size:
        """Of the whole parameter."""
        return parameter.shape

    @property
    def are_offloaded(self) -> bool:
        """Whether gradients are copied to the CPU, where the optimizer steps."""
        return bool(self._zero.cpu_offload)

    def gradients(self) -> Iterator[Tensor]:
        """This process' share of the averaged gradients of a step, to be changed in place."""
        if self._zero.cpu_offload:
            yield from (flat.grad for flat in self._zero.single_partition_of_fp32_groups)
        else:
            for group in self._zero.averaged_gradients.values():
                yield from group

    def forget_gradients(self) -> None:
        """After a step: DeepSpeed would use them again where a parameter gets none in the next."""
        if self._zero.cpu_offload:
            for flat in self._zero.single_partition_of_fp32_groups:
                flat.grad.zero_()
            for accumulated in self._zero.accumulated_grads_in_cpu.values():
                accumulated.zero_()

    def finish_accumulation(self) -> None:
        """After a step's last backward: DeepSpeed would leave out parameters that are not in it."""
        if self._zero.cpu_offload and self._zero.partition_gradients:
            self._zero.finalize_gradient_accumulation_boundary()

    def relink(self) -> None:
        """After the optimizer's state was replaced: DeepSpeed's own look-up is made anew."""
        self._zero._hp_optimizer_states_linked = False


class ParameterSlices:
    """Of ZeRO's stage 3, in which every process holds a part of each parameter.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    def of(self, parameter: Any) -> Slice | None:
        """A parameter's; ``None`` for one that is not trained."""
        place = self._zero.grad_position.get(self._zero.get_param_id(parameter))
        if place is None:
            return None
        index, start, _ = place
        offset, length = _part(parameter)
        return Slice(self._zero.fp32_partitioned_groups_flat[index], start, offset, length)

    def weights(self, parameter: Any) -> Slice:
        """What forward passes gather a parameter from, trained or not."""
        offset, length = _part(parameter)
        return Slice(parameter.ds_tensor.data.view(-1), 0, offset, length)

    def shape(self, parameter: Any) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(parameter.ds_shape)

    @property
    def are_offloaded(self) -> bool:
        """Whether gradients are copied to the CPU, where the optimizer steps."""
        return bool(self._zero.offload_optimizer)

    def gradients(self) -> Iterator[Tensor]:
        """This process' share of the averaged gradients of a step, to be changed in place."""
        if self._zero.offload_optimizer:
            yield from (flat.grad for flat in self._zero.fp32_partitioned_groups_flat)
        else:
            for group in self._zero.averaged_gradients.values():
                yield from group

    def forget_gradients(self) -> None:
        """After a step: DeepSpeed would use them again where a parameter gets none in the next."""
        self._zero.grad_partitions_flat_buffer.zero_()
        if self._zero.offload_optimizer:
            for flat in self._zero.fp32_partitioned_groups_flat:
                flat.grad.zero_()

    def finish_accumulation(self) -> None:
        """After a step's last backward: DeepSpeed would leave out parameters that are not in it."""
        if self._zero.offload_optimizer:
            self._zero.finalize_gradient_accumulation_boundary()

    def relink(self) -> None:
        """Nothing is looked up otherwise than here."""


def _part(parameter: Any) -> tuple[int, int]:
    """First element and length of this process' part; the last ones are filled up, or empty."""
    size = parameter.partition_numel()
    offset = min(size * torch.distributed.get_rank(), parameter.ds_numel)
    return offset, min(size, parameter.ds_numel - offset)
