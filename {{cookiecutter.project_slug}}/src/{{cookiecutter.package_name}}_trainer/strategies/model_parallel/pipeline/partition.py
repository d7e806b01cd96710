"""Which process of a pipeline has which children of ``sequential_module``, and which parameters."""

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....checkpoint import dtensors
from ....memory import meta_device
from ....module import TrainingModule
from .processes import Processes

ATTRIBUTE = "sequential_module"


def children(module: nn.Module) -> list[nn.Module]:
    """The children of its ``sequential_module``; one that is there twice is listed twice."""
    found = getattr(module, ATTRIBUTE)._modules.values()
    return [each for each in found if each is not None]


def bounds(balance: Sequence[int]) -> list[range]:
    """Indices of the children of each stage."""
    ends = [sum(balance[: index + 1]) for index in range(len(balance))]
    return [range(end - size, end) for size, end in zip(balance, ends, strict=True)]


def parameter_costs(module: nn.Module) -> list[float]:
    """Number of parameters of each child; a shared one counts where it is first used."""
    seen: set[int] = set()
    costs = []
    for child in children(module):
        own = {id(each): each.numel() for each in child.parameters() if id(each) not in seen}
        seen.update(own)
        costs.append(float(sum(own.values())))
    return costs


def part(sequential: nn.Sequential, indices: range) -> nn.Sequential:
    """A copy of a sequential module with some of its children, which are shared with it."""
    taken = list(sequential._modules.items())[indices.start : indices.stop]
    found = copy.copy(sequential)
    vars(found)["_modules"] = dict(taken)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(found)[name] = OrderedDict()  # those of the whole run before and after the pipeline
    vars(found).pop("forward", None)
    return found


def arguments(part: nn.Sequential, given: Any) -> tuple[Any, ...]:
    """The arguments of a part for what the part before gives.

    torch's own class passes on a tuple as one argument; a class whose forward takes ``*inputs``
    gets several.
    """
    parameters = inspect.signature(type(part).forward).parameters.values()
    takes_several = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return given if isinstance(given, tuple) and takes_several else (given,)


class Ownership:
    """Which tensors of a module are on which processes of a pipeline.

    A child's are on the process that has its stage. All others are on the first and the last one,
    where the user's step runs.

    Args:
        module: The user's module, whole.
        stages: Indices of the children of each stage.
        processes: The processes of the pipeline.
    """

    def __init__(
        self, module: TrainingModule, stages: Sequence[range], processes: Processes
    ) -> None:
        self.position = processes.position
        self._module = module
        self._ends = frozenset((0, processes.count - 1))
        self._layers: dict[int, set[int]] = defaultdict(set)
        own = children(module)
        for stage, indices in enumerate(stages):
            for index in indices:
                for layer in own[index].modules():
                    self._layers[id(layer)].add(processes.position_of(stage))
        self.refresh()

    def refresh(self) -> None:
        """Know the module's tensors again, after some of them have been replaced."""
        holders: dict[int, set[int]] = defaultdict(set)
        for layer in self._module.modules():
            for each in (*layer._parameters.values(), *layer._buffers.values()):
                holders[id(each)].update(self._positions(layer))
        self._holders = {key: frozenset(positions) for key, positions in holders.items()}

    def _positions(self, layer: nn.Module) -> Collection[int]:
        return self._layers.get(id(layer), self._ends)

    def has_layer(self, layer: nn.Module) -> bool:
        """Whether this process has a layer."""
        return self.position in self._positions(layer)

    def holders(self, tensor: Tensor) -> frozenset[int]:
        """Positions of the processes that have a parameter or buffer."""
        return self._holders.get(id(tensor), self._ends)

    def is_own(self, tensor: Tensor) -> bool:
        """Whether this process has a parameter or buffer."""
        return self.position in self.holders(tensor)

    def counts_here(self, tensor: Tensor) -> bool:
        """Whether this process is the one that counts a parameter."""
        return max(self.holders(tensor)) == self.position

    def shared(self, tensors: Iterable[Tensor]) -> dict[frozenset[int], list[Tensor]]:
        """Those of several processes, by the positions of these; the same on all processes."""
        found: dict[frozenset[int], list[Tensor]] = defaultdict(list)
        for each in tensors:
            if len(self.holders(each)) > 1:
                found[self.holders(each)].append(each)
        return dict(sorted(found.items(), key=lambda entry: sorted(entry[0])))

    def materialize(self, module: TrainingModule) -> None:
        """Allocate this process' parameters that are on the meta device; free the others'."""
        before = [
            (layer, name, each)
            for layer in module.modules()
            for name, each in layer._parameters.items()
            if each is not None and each.is_meta
        ]
        meta_device.materialize_layers(module, filter(self.has_layer, module.modules()))
        pairs = [(old, layer._parameters[name]) for layer, name, old in before]
        made = {id(old): new for old, new in pairs if new is not None and not new.is_meta}
        for layer, name, old in before:
            if id(old) not in made:
                made[id(old)] = nn.Parameter(_without_memory(old), old.requires_grad)
            layer._parameters[name] = made[id(old)]
        self.refresh()

    def move(self, module: nn.Module, device: torch.device) -> None:
        """Move this process' parameters and buffers to its device."""
        for each in (*module.parameters(), *module.buffers()):
            if self.is_own(each):
                each.data = each.data.to(device)

    def broadcast_shared(self, tensors: Iterable[Tensor], processes: Processes) -> None:
        """Broadcast tensors that several stages have, from the last of them."""
        for positions, shared in self.shared(tensors).items():
            group = processes.among(positions)
            if group is not None:
                for each in shared:
                    dist.broadcast(each.detach(), processes.rank_at(max(positions)), group)

    def broadcast_to_replicas(self, tensors: Iterable[Tensor], processes: Processes) -> None:
        """Broadcast this process' tensors from the first pipeline."""
        group = processes.across_replicas()
        if group is not None:
            for each in filter(self.is_own, tensors):
                dist.broadcast(each.detach(), processes.rank_at(self.position, 0), group)

    def free_others(self, module: nn.Module) -> None:
        """Free the memory of parameters and buffers of other processes; their shapes remain."""
        for each in (*module.parameters(), *module.buffers()):
            if not self.is_own(each):
                each.grad = None
                each.data = _without_memory(each)


def is_divided(module: nn.Module) -> bool:
    """Whether a fit has left parameters of a module without memory, or sharded."""
    return any(dtensors.is_sharded(each) for each in module.parameters()) or any(
        each.numel() > 1 and not each.is_meta and each.untyped_storage().nbytes() < each.nbytes
        for each in module.parameters()
        if each.layout == torch.strided and type(each.data) is Tensor
    )


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape with one element in memory; NaN, so that its use is noticed."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    device = "cpu" if tensor.is_meta else tensor.device
    value = torch.full((), math.nan if floats else 0, dtype=tensor.dtype, device=device)
    return value.expand(tensor.shape)
