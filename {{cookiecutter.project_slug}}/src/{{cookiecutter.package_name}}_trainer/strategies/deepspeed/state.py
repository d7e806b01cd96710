"""Locate a parameter's elements in ZeRO's flat tensors, and convert them to full tensors by name.

Stages 1 and 2 flatten the parameters of a group into one tensor, of which each process has a slice.
Stage 3 slices each parameter, and concatenates the slices. ``deepspeed.utils`` has such look-ups,
but they gather on every process, without step counts, and not before the first step. For a
checkpoint, parameters are gathered on one process after the other: none ever holds all of them.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint import ShardedDict, Stored, fill_module, read_all
from ...errors import ConfigurationError
from ...launch import collectives
from ..optimizer_state import check_groups, implementation, named_groups

_STEPS = "step"  # Adam's step count; may be a tensor


@dataclass(frozen=True)
class Slice:
    """The position of a part of a parameter."""

    flat: Tensor  # which the optimizer steps
    start: int  # in ``flat``
    offset: int  # in the parameter
    length: int  # number of elements, perhaps none

    def within(self, tensor: Tensor) -> Tensor:
        """The part, in a tensor with the shape of ``flat``."""
        return tensor.narrow(0, self.start, self.length)

    def cut(self, tensor: Tensor | Stored) -> Tensor:
        """The part, in a full parameter; no more of a stored one is read."""
        if isinstance(tensor, Stored):
            return tensor.read_flat(self.offset, self.length)
        return tensor.reshape(-1).narrow(0, self.offset, self.length)


class _Slices:
    """What the slices of all stages of DeepSpeed's optimizer ``zero`` have in common.

    ``flats``: this process' flat parameters, by group; ``are_offloaded``: gradients are on the CPU.
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
        return itertools.chain.from_iterable(self._zero.averaged_gradients.values())

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
        groups = enumerate(zero.bit16_groups)
        self._groups = {id(p): index for index, group in groups for p in group}

    def of(self, parameter: Any) -> Slice | None:
        """The slice of a parameter; ``None`` if it is not trained."""
        if id(parameter) not in self._groups:
            return None
        flat = self._flats[self._groups[id(parameter)]]
        if (mapping := parameter._hp_mapping) is None:
            return Slice(flat, 0, 0, 0)
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Slice(flat, here.start, there.start, here.numel)

    @torch.no_grad()
    def take_weights(self) -> None:
        rank, parts = dist.get_rank(), self._zero.parallel_partitioned_bit16_groups
        for flat, shards in zip(self._flats, parts, strict=True):
            flat.copy_(shards[rank])

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
        if (place := self._zero.grad_position.get(self._zero.get_param_id(parameter))) is None:
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


Slices = FlatSlices | ParameterSlices


def _part(parameter: Any) -> tuple[int, int]:
    """First element and length of this process' part; the last parts are padded or empty."""
    size = parameter.partition_numel()
    offset = min(size * dist.get_rank(), parameter.ds_numel)
    return offset, min(size, parameter.ds_numel - offset)


def clip_finite(gradients: Iterable[Tensor], value: float) -> None:
    """Clip gradients by value, but those that overflowed, which the engine is to detect."""
    for gradient in gradients:
        # On the device, without synchronization with the host.
        bound = torch.where(torch.isfinite(gradient).all(), value, math.inf)
        gradient.clamp_(-bound, bound)


class ShardedState:
    """Weights and optimizer state of a ZeRO optimizer; ``groups``: its parameters' names."""

    def __init__(
        self, module: nn.Module, slices: Slices, optimizer: Optimizer, groups: list[list[str]]
    ) -> None:
        self._module, self._slices = module, slices
        self._optimizer, self._groups = optimizer, groups
        self._parameters = dict(module.named_parameters())
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        # Parameters with several names: each name with the first one.
        named = module.named_parameters(remove_duplicate=False)
        self._aliases = {name: first[id(parameter)] for name, parameter in named}

    def state(self) -> dict[str, Any]:
        model, groups = self._weights(), named_groups(self._optimizer.param_groups, self._groups)
        return {"model": model, "optimizers": [{"state": self._values(), "param_groups": groups}]}

    def _weights(self) -> dict[str, Any]:
        state = dict(self._module.state_dict())
        if isinstance(self._slices, FlatSlices):
            return state
        weights = ShardedDict()
        for index, (name, parameter) in enumerate(self._parameters.items()):
            shard = self._slices.weights(parameter)
            tensor = _gather(index, shard, shard.flat, self._slices.shape(parameter))
            if tensor is not None:
                weights.update({alias: tensor for alias, of in self._aliases.items() if of == name})
        if collectives.rank() == 0:
            weights.update({name: state[name] for name in state if name not in self._aliases})
        return weights

    def _values(self) -> ShardedDict:
        states, names = ShardedDict(), itertools.chain.from_iterable(self._groups)
        for index, (name, shard) in enumerate(self._trained(names)):
            shape = self._slices.shape(self._parameters[name])
            values: dict[str, Any] = self._optimizer.state.get(shard.flat, {})
            state = {key: values[key] for key in sorted(values)}
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == shard.flat.shape:
                    state[key] = _gather(index, shard, value, shape)
            if state and _keeps(index):
                states[name] = state
        return states

    def _trained(self, names: Iterable[str]) -> Iterator[tuple[str, Slice]]:
        for name in names:
            if (shard := self._slices.of(self._parameters[name])) is not None:
                yield name, shard

    def load(self, state: Mapping[str, Any]) -> None:
        if isinstance(self._slices, ParameterSlices):
            self._load_parts(state["model"], self._slices)
        else:
            fill_module(self._module, state["model"])
            for name, shard in self._trained(self._parameters):
                shard.within(shard.flat.data).copy_(shard.cut(self._parameters[name].data))
        (saved,) = state["optimizers"]
        check_groups(saved["param_groups"], self._groups)
        for group, values in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            options = {key: read_all(values[key]) for key in values if key != "params"}
            group.update(options | implementation(group))
        self._load_values(saved["state"])

    def _load_parts(self, model: Mapping[str, Any], slices: ParameterSlices) -> None:
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        # For their names only: the tensors have no elements outside of a step.
        fill_module(self._module, {name: parameters.get(name, model[name]) for name in model})
        for name, parameter in self._parameters.items():
            saved, shape = model[name], slices.shape(parameter)
            if saved.shape != shape:
                shapes = f"{tuple(saved.shape)} in the checkpoint and {tuple(shape)} here"
                raise ConfigurationError(f"{name} has the shape {shapes}")
            weights = slices.weights(parameter)
            values = weights.cut(saved)
            for shard in (weights, slices.of(parameter)):
                if shard is not None:
                    shard.within(shard.flat.data).copy_(values)
            if parameter.shape == shape:  # small parameters are also kept in full
                parameter.data.copy_(saved)

    def _load_values(self, saved: Mapping[str, Any]) -> None:
        self._optimizer.state.clear()
        # In stage 3, an optimizer's groups contain their parameters only during a step.
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name, shard in self._trained(names):
                shape = self._slices.shape(self._parameters[name])
                for key, value in saved.get(name, {}).items():
                    self._load_value(shard, key, value, shape)
                if _STEPS in (values := self._optimizer.state[shard.flat]):
                    values[_STEPS] = step_of(self._optimizer, group, values[_STEPS], shard.flat)
        self._slices.relink()

    def _load_value(self, shard: Slice, key: str, value: Any, shape: torch.Size) -> None:
        values = self._optimizer.state[shard.flat]
        is_tensor = isinstance(value, Tensor | Stored) and key != _STEPS
        if not is_tensor or value.shape != shape:
            values[key] = read_all(value)
            return
        if key not in values:
            values[key] = torch.zeros_like(shard.flat.data, dtype=value.dtype)
        shard.within(values[key]).copy_(shard.cut(value))


def _keeps(index: int) -> bool:
    """Whether this process gathers the parameter with this index."""
    return index % collectives.world_size() == collectives.rank()


def _gather(index: int, shard: Slice, flat: Tensor, shape: torch.Size) -> Tensor | None:
    """Gather a full tensor from all slices, on the process that keeps it; ``None`` elsewhere."""
    tensor = flat.new_zeros(shape.numel())
    tensor.narrow(0, shard.offset, shard.length).copy_(shard.within(flat))
    dist.reduce(tensor, dst=index % collectives.world_size())
    return tensor.view(shape).cpu() if _keeps(index) else None


def step_of(optimizer: Optimizer, group: Mapping[str, Any], step: Any, flat: Tensor) -> Any:
    """A loaded step count as an optimizer stores it: torch's in tensors, DeepSpeed's not."""
    home = type(optimizer).__module__.partition(".")[0]
    if home == "deepspeed":
        return int(step)
    if home == "torch":
        is_on_device = group.get("fused") or group.get("capturable")
        return torch.as_tensor(step, device=flat.device if is_on_device else None).float()
    return step
