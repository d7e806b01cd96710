"""Which process of a pipeline has which children of ``sequential_module``, and which parameters."""

import copy
import datetime
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....memory import meta_device
from ....module import TrainingModule

ATTRIBUTE = "sequential_module"
Shared = tuple[list[Tensor], dist.ProcessGroup, int]
"""Tensors that several processes have, their group, and the rank of the last of them."""


class Processes:
    """This process' position in its pipeline (0 has the first stage), and its groups.

    The first rank of a pipeline has the last stage, because it logs and returns predictions. A
    pipeline has ``count`` processes, each with one stage.
    """

    def __init__(self, rank: int, world_size: int, count: int, timeout: datetime.timedelta) -> None:
        self._ranks: list[list[int]] = torch.arange(world_size).view(-1, count).flip(1).tolist()
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.count, self.replicas = count, len(self._ranks)
        self.replica, place = divmod(rank, count)
        self.position = count - 1 - place
        self.has_first, self.has_last = self.position == 0, self.position == count - 1

    def rank_at(self, position: int) -> int:
        return self._ranks[self.replica][position]

    def among(self, positions: Iterable[int]) -> dist.ProcessGroup | None:
        """Group of the processes at some positions, ``None`` on others; all call it at once."""
        key = tuple(sorted(positions))
        group = self._group(key, [[pipeline[place] for place in key] for pipeline in self._ranks])
        return group if self.position in key else None

    def across_replicas(self) -> dist.ProcessGroup | None:
        """Group of the processes with the same stages; ``None`` if there is one pipeline."""
        if self.replicas == 1:
            return None
        return self._group((), [list(ranks) for ranks in zip(*self._ranks, strict=True)])

    def _group(self, key: tuple[int, ...], ranks: list[list[int]]) -> dist.ProcessGroup:
        if key not in self._groups:
            lines = [sorted(line) for line in ranks]
            self._groups[key], _ = dist.new_subgroups_by_enumeration(lines, timeout=self._timeout)
        return self._groups[key]

    def close(self) -> None:
        """Drop the groups, and so gloo's threads."""
        self._groups.clear()


def part_of(sequential: nn.Sequential, indices: range) -> nn.Sequential:
    """A copy of a sequential module with some of its children, which are shared with it."""
    stage = copy.copy(sequential)
    vars(stage)["_modules"] = dict(list(sequential._modules.items())[indices.start : indices.stop])
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(stage)[name] = OrderedDict()  # those of the whole run before and after the pipeline
    vars(stage).pop("forward", None)
    return stage


def arguments(stage: nn.Sequential, values: Any) -> tuple[Any, ...]:
    """The arguments of a part for what the part before gives.

    A tuple is one argument, as for torch's own class, unless a class' forward takes ``*inputs``.
    """
    parameters = inspect.signature(type(stage).forward).parameters.values()
    takes_several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return values if isinstance(values, tuple) and takes_several else (values,)


class Ownership:
    """Which tensors of a module are on which processes of a pipeline.

    A child's are on the process that has its stage. All others are on the first and the last one,
    where the user's step runs. ``sizes``: number of children of each stage.
    """

    def __init__(self, module: TrainingModule, sizes: Sequence[int], processes: Processes) -> None:
        self._module, self._processes = module, processes
        self._ends = frozenset((0, processes.count - 1))
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self._bounds = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._layers: dict[int, set[int]] = defaultdict(set)
        children = list(getattr(module, ATTRIBUTE)._modules.values())
        for stage, indices in enumerate(self._bounds):
            for index in indices:
                for layer in children[index].modules():
                    self._layers[id(layer)].add(stage)
        self._find_holders()

    def _find_holders(self) -> None:
        holders: dict[int, set[int]] = defaultdict(set)
        for layer in self._module.modules():
            for parameter in (*layer._parameters.values(), *layer._buffers.values()):
                holders[id(parameter)].update(self._layers.get(id(layer), self._ends))
        self._holders = {key: frozenset(positions) for key, positions in holders.items()}

    def part(self) -> nn.Sequential:
        """This process' part of ``sequential_module``."""
        return part_of(getattr(self._module, ATTRIBUTE), self._bounds[self._processes.position])

    def _has_layer(self, layer: nn.Module) -> bool:
        return self._processes.position in self._layers.get(id(layer), self._ends)

    def _holding(self, tensor: Tensor) -> frozenset[int]:
        return self._holders.get(id(tensor), self._ends)

    def is_own(self, tensor: Tensor) -> bool:
        """Whether this process has a parameter or buffer."""
        return self._processes.position in self._holding(tensor)

    def counts_here(self, tensor: Tensor) -> bool:
        """Whether this process, of those of its pipeline, counts and saves a tensor."""
        return self._processes.position == max(self._holding(tensor))

    def shared(self, tensors: Iterable[Tensor]) -> list[Shared]:
        """This process' tensors that others have, too; all processes must call it at once."""
        holders: dict[frozenset[int], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            if len(self._holding(tensor)) > 1:
                holders[self._holding(tensor)].append(tensor)
        groups = [(key, self._processes.among(key)) for key in sorted(holders, key=sorted)]
        return [
            (holders[key], group, self._processes.rank_at(max(key)))
            for key, group in groups
            if group is not None
        ]

    def materialize(self) -> None:
        """Allocate this process' parameters that are on the meta device; free the others'."""
        meta = [
            (layer._parameters, name, parameter)
            for layer in self._module.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.is_meta
        ]
        meta_device.Initializer(self._module).materialize(self._module, self._has_layer)
        made = {id(old): held[name] for held, name, old in meta if held[name] is not old}
        for held, name, old in meta:
            empty = nn.Parameter(_without_memory(old, torch.device("cpu")), old.requires_grad)
            held[name] = made.setdefault(id(old), empty)
        self._find_holders()  # other tensors than before

    def equalize(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast tensors that several stages have, from the last of them; then :meth:`join`."""
        for shared, group, last in self.shared(tensors):
            for tensor in shared:
                dist.broadcast(tensor.detach(), last, group)
        self.join(tensors)

    def join(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast this process' tensors from the first pipeline to the others."""
        if (group := self._processes.across_replicas()) is not None:
            for tensor in filter(self.is_own, tensors):
                dist.broadcast(tensor.detach(), group=group, group_src=0)

    def free_others(self, device: torch.device) -> None:
        """Free the memory of tensors of other processes; their shapes remain, on a device."""
        for parameter in (*self._module.parameters(), *self._module.buffers()):
            if not self.is_own(parameter):
                parameter.grad = None
                parameter.data = _without_memory(parameter, device)


def _without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape with one element in memory; NaN, so that its use is noticed."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    value = torch.full((), math.nan if floats else 0, dtype=tensor.dtype, device=device)
    return value.expand(tensor.shape)
