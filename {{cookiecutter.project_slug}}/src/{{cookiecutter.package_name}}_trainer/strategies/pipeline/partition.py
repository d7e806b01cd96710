"""Which process of a pipeline has which children of ``sequential_module``, and which parameters."""

import contextlib
import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoint import dtensors
from ...memory import meta_device
from ...module import TrainingModule
from .messages import Values
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


def outside(module: nn.Module) -> list[nn.Parameter]:
    """The parameters outside ``sequential_module``."""
    inside = {id(each) for each in getattr(module, ATTRIBUTE).parameters()}
    return [each for each in module.parameters() if id(each) not in inside]


def arguments(part: nn.Sequential, given: Values) -> tuple[Any, ...]:
    """The arguments of a part for what the part before gives.

    torch's own class passes on a tuple as one argument; a class whose forward takes ``*inputs``
    gets several.
    """
    parameters = inspect.signature(type(part).forward).parameters.values()
    takes_several = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return (given.tensors,) if given.is_tuple and not takes_several else given.tensors


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
        ends = frozenset((0, processes.count - 1))
        inside: dict[int, set[int]] = defaultdict(set)
        own = children(module)
        for stage, indices in enumerate(stages):
            for index in indices:
                for layer in own[index].modules():
                    inside[id(layer)].add(processes.position_of(stage))
        holders: dict[int, set[int]] = defaultdict(set)
        self._layers: list[nn.Module] = []
        for layer in module.modules():
            positions = inside.get(id(layer), ends)
            if self.position in positions:
                self._layers.append(layer)
            for each in _tensors(layer):
                holders[id(each)].update(positions)
        self._holders = {key: frozenset(positions) for key, positions in holders.items()}
        self._ends = ends

    def holders(self, tensor: Tensor) -> frozenset[int]:
        """Positions of the processes that have a parameter or buffer."""
        return self._holders.get(id(tensor), self._ends)

    def is_own(self, tensor: Tensor) -> bool:
        """Whether this process has a parameter or buffer."""
        return self.position in self.holders(tensor)

    def has_layer(self, layer: nn.Module) -> bool:
        """Whether this process has a layer."""
        return any(each is layer for each in self._layers)

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
        """Allocate this process' parameters that are on the meta device, and name the new ones."""
        before = {
            (id(layer), name): each
            for layer in module.modules()
            for name, each in layer._parameters.items()
            if each is not None and each.is_meta
        }
        meta_device.materialize_layers(module, self._layers)
        others: dict[int, nn.Parameter] = {}
        for layer in module.modules():
            for name, each in layer._parameters.items():
                if (id(layer), name) in before and each is not None:
                    old, new = before[id(layer), name], each
                    if each.is_meta:  # of another process
                        new = layer._parameters[name] = _replacement(old, others)
                    self._holders[id(new)] = self._holders[id(old)]
        self._kept_alive = list(before.values())  # or ids could be used again

    @contextlib.contextmanager
    def following(self, module: TrainingModule) -> Iterator[None]:
        """Know the parameters that replace others in this context, by their names."""
        before = {name: id(each) for name, each in module.named_parameters(remove_duplicate=False)}
        yield
        found = {
            id(each): self._holders[before[name]]
            for name, each in module.named_parameters(remove_duplicate=False)
        }
        # The replaced ones may be gone, and their ids be used again.
        replaced = set(before.values())
        kept = {key: each for key, each in self._holders.items() if key not in replaced}
        self._holders = kept | found

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


def _tensors(layer: nn.Module) -> list[Tensor]:
    own: Mapping[str, Tensor | None] = {**layer._parameters, **layer._buffers}
    return [each for each in own.values() if each is not None]


def _replacement(old: nn.Parameter, made: dict[int, nn.Parameter]) -> nn.Parameter:
    if id(old) not in made:
        made[id(old)] = nn.Parameter(_without_memory(old), requires_grad=old.requires_grad)
    return made[id(old)]


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape with one element in memory; NaN, so that its use is noticed."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    device = "cpu" if tensor.is_meta else tensor.device
    value = torch.full((), math.nan if floats else 0, dtype=tensor.dtype, device=device)
    return value.expand(tensor.shape)
