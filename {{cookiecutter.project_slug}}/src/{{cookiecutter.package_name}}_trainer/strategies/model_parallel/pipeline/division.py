"""How a pipeline is divided: its options, what fits them, and measurements of the children."""

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ....data import randomness
from ....memory import activation_checkpointing, meta_device
from ....module import TrainingModule
from .activations import alias
from .partition import ATTRIBUTE, arguments, part_of
from .stages import Boundary, Step

Context = Callable[[], AbstractContextManager[None]]
_REPEATS = 3
_COPIES_OF_PARAMETERS = 4  # a parameter, its gradient, and two states of an optimizer such as Adam


@dataclass(frozen=True)
class Measured:
    """Of a child and a micro-batch: seconds of forward and backward, and bytes."""

    seconds: float
    saved: int  # what its forward keeps for its backward
    inputs: int
    parameters: int  # with gradients and the states of an optimizer


@dataclass(frozen=True)
class Shape:
    """The options of a pipeline; see :class:`.strategy.Sequential`."""

    stages: int | None
    balance: str | Sequence[int]
    microbatches: int
    schedule: str
    checkpoint: str

    def processes(self, run_processes: int) -> int:
        """Number of processes of a pipeline in a run of so many processes."""
        return self.stages or run_processes

    def count(self, samples: int) -> int:
        """The largest number of micro-batches that divides a batch."""
        counts = range(min(self.microbatches, samples), 1, -1)
        return next((count for count in counts if samples % count == 0), 1)

    def checkpoints(self, number: int, count: int) -> bool:
        """Whether stages recompute the activations of a micro-batch of so many."""
        except_last = self.checkpoint == "except_last" and number < count - 1
        return self.checkpoint == "always" or except_last

    def sizes(self, module: nn.Module, stages: int) -> list[int]:
        """Number of children of each stage; by parameters, if there are no measurements."""
        if not isinstance(self.balance, str):
            return list(self.balance)
        costs, seen = list[float](), set[int]()  # a shared parameter counts where it is first used
        for child in getattr(module, ATTRIBUTE):
            costs.append(sum(p.numel() for p in child.parameters() if id(p) not in seen))
            seen.update(map(id, child.parameters()))
        return divide(total(costs), len(costs), stages)

    def measured_sizes(self, measured: Sequence[Measured], stages: int) -> list[int]:
        """Number of children of each stage, by measurements of the children."""
        if self.balance == "time":
            cost = total([child.seconds for child in measured])
        else:
            cost = functools.partial(self._memory, measured, stages)
        return divide(cost, len(measured), stages)

    def _memory(self, costs: Sequence[Measured], stages: int, stage: int, indices: range) -> float:
        """Bytes that a stage needs while it holds as many micro-batches as its schedule lets."""
        most = stages - stage if self.schedule == "1f1b" else self.microbatches
        held = min(self.microbatches, most)
        saved, inputs = sum(costs[index].saved for index in indices), costs[indices.start].inputs
        kept = saved * held if self.checkpoint == "never" else saved + inputs * held
        return kept + sum(costs[index].parameters for index in indices)

    def problems_with(self, run_processes: int) -> list[str]:
        """One line for each option that a number of processes contradicts."""
        count = self.processes(run_processes)
        if run_processes % count:
            problem = f"{run_processes} processes are not divisible by it"
            return [f"strategy_options.stages={count}: {problem}; change it, or devices"]
        if not isinstance(self.balance, str) and len(self.balance) != count:
            problem = f"{list(self.balance)} has {len(self.balance)} entries for {count} stages"
            return [f"strategy_options.balance={problem}; give one per stage"]
        return []


def problems_of_module(module: TrainingModule, shape: Shape, run_processes: int) -> list[str]:
    """One line for each property of a module that does not fit."""
    name, sequential = type(module).__name__, getattr(module, ATTRIBUTE, None)
    if not isinstance(sequential, nn.Sequential):
        what = "has none" if sequential is None else f"has a {type(sequential).__name__}"
        needed = f"a pipeline divides the children of self.{ATTRIBUTE}, an nn.Sequential"
        return [f"{needed}; {name} {what}"]
    lines = []
    count, stages = len(sequential), shape.processes(run_processes)
    if not isinstance(shape.balance, str) and sum(shape.balance) != count:
        problem = f"{list(shape.balance)} is of {sum(shape.balance)} children"
        lines.append(f"strategy_options.balance={problem}; {name}.{ATTRIBUTE} has {count}")
    elif count < stages:
        problem = f"{count} children for {stages} stages"
        lines.append(f"{name}.{ATTRIBUTE} has {problem}; use fewer stages")
    if "forward" in vars(sequential):
        lines.append(f"{name}.{ATTRIBUTE} has a forward of its own, which would be replaced")
    elif not _is_chain(sequential):
        lines.append(
            f"{name}.{ATTRIBUTE} is a {type(sequential).__name__}, whose forward does more than to "
            "call each child with what the one before gives, and a pipeline would do that on every "
            f"stage; do it in training_step, before and after self.{ATTRIBUTE}, or in a child"
        )
    return lines + [
        f"{name}.{path} synchronizes over all processes, and only the last stage updates it; log "
        "numbers instead, or use strategy='ddp'"
        for path, layer in module.named_modules()
        if hasattr(layer, "metric_state") and hasattr(layer, "_update_count")
    ]


def _is_chain(sequential: nn.Sequential) -> bool:
    """Whether a forward only calls its children in order, each with what the one before gives."""
    kind = type(sequential)
    if kind.forward is nn.Sequential.forward:
        return True
    values: list[object] = [object()]

    class Probe(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, value: object) -> object:
            if value is not values[-1] or len(values) != self.index + 1:
                raise ValueError
            values.append(object())
            return values[-1]

    names, probed = enumerate(sequential._modules), copy.copy(sequential)
    vars(probed)["_modules"] = {name: Probe(index) for index, name in names}
    try:
        output: object = kind.forward(probed, values[0])
    except Exception:  # it may do anything
        return False
    return output is values[-1] and len(values) == len(sequential) + 1


def divide(cost: Callable[[int, range], float], count: int, stages: int) -> list[int]:
    """Divide children into stages of neighbors, so that the largest cost of a stage is least.

    ``cost``: of a stage, counted from 0, with some children. Returns the number in each, above 0.
    """

    @functools.cache
    def best(stages: int, end: int) -> tuple[float, tuple[int, ...]]:
        """The largest cost of the best division of the first children, and its sizes."""
        if not stages:
            return (math.inf if end else 0.0), ()
        choice: tuple[float, tuple[int, ...]] = math.inf, ()
        for start in range(stages - 1, end):
            before, sizes = best(stages - 1, start)
            if before < choice[0]:
                largest = max(before, cost(stages - 1, range(start, end)))
                choice = min(choice, (largest, (*sizes, end - start)), key=lambda option: option[0])
        return choice

    return list(best(stages, count)[1])


def total(costs: Sequence[float]) -> Callable[[int, range], float]:
    """The cost of a stage, for :func:`divide`: the sum of its children's."""
    return lambda stage, indices: sum(costs[index] for index in indices)


def measure(
    module: TrainingModule, run_step: Callable[[], Any], autocast: Context, device: torch.device
) -> list[Measured]:
    """Measure each child on a device, with a step that runs on the CPU, as the module does."""
    state = module.trainer_state
    # Those of a checkpoint come later, and steps need numbers.
    weights = {name: weight for name, weight in state.weights.items() if weight is not None}
    module.trainer_state = replace(state, weights=weights)
    meta_device.Initializer(module).materialize(module)
    sequential: Any = getattr(module, ATTRIBUTE)
    boundary = Boundary(module, torch.device("cpu"))
    results, seen = [], dict[int, Tensor]()
    with randomness.Stream(0), activation_checkpointing.buffers_kept(module):
        try:
            with torch.no_grad():
                args = boundary.inputs(Step(run_step))
        finally:
            boundary.close()
        for index in range(len(sequential)):
            stage = copy.deepcopy(part_of(sequential, range(index, index + 1))).to(device)
            inputs = tree_map_only(
                Tensor, lambda x: x.detach().to(device).requires_grad_(x.is_floating_point()), args
            )
            measured, output = _measure(stage, inputs, seen, autocast)
            results.append(measured)
            args = arguments(stage, output)
    return results


def _measure(
    stage: nn.Sequential, inputs: tuple[Any, ...], seen: dict[int, Tensor], autocast: Context
) -> tuple[Measured, Any]:
    """Measure a child; ``seen``: what earlier children have saved, by its address."""

    def run() -> Any:
        with autocast():
            return stage(*tree_map_only(Tensor, alias, inputs))

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # an output that saved itself would never be freed

    def seconds() -> float:
        started = time.perf_counter()
        if outputs := [x for x in tree_leaves(run()) if isinstance(x, Tensor) and x.requires_grad]:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            if outputs[0].device.type != "cpu":
                torch.get_device_module(outputs[0].device).synchronize()
        return time.perf_counter() - started

    known = {*seen, *(parameter.untyped_storage().data_ptr() for parameter in stage.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    saved = [tensor for pointer, tensor in seen.items() if pointer not in known]
    measured = Measured(
        min(seconds() for _ in range(_REPEATS)),
        sum(tensor.untyped_storage().nbytes() for tensor in saved),
        sum(leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)),
        _COPIES_OF_PARAMETERS * sum(parameter.nbytes for parameter in stage.parameters()),
    )
    return measured, output
