"""Traces training steps of one rank, with its own strategy: what is alive at each moment."""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...data import batch_length
from ...data.moving import mapped
from ...loop import ManualOptimization
from ...memory import activation_checkpointing
from ...module import TrainingModule
from ...run.plan import Plan
from ...run.rank import RankRun
from ...strategies import sync_batchnorm
from ...strategies.fsdp.fsdp import FSDP
from ...strategies.fsdp.units import choose_units
from ...strategies.memory import Sizes, moments
from ...strategies.optimizers import configured
from ...strategies.precision import Precision
from ...strategies.process_group import ProcessGroupStrategy
from . import fake
from .live import Live

_CPU = torch.device("cpu")
_UNIT = 1_000_000


@dataclass(frozen=True)
class Trace:
    """The sizes of a rank at the two batches, and what else a trace tells.

    ``asked``: operators that waited for values; ``rates``: learning rates of the optimizers;
    ``elements``: number of elements of all parameters.
    """

    one: Sizes
    two: Sizes
    asked: Sequence[str]
    rates: Sequence[float]
    elements: int


class PlannedRun(RankRun):
    """The run that a module sees: nothing is logged."""

    def __init__(self, plan: Plan, replicas: int, samples: int) -> None:
        super().__init__(plan, None, is_started=False)
        context: Any = SimpleNamespace(
            samples=samples, ends_epoch=False, loader="", weight=1.0, rate_factor=1.0
        )
        self.recorder: Any = SimpleNamespace(context=context)
        self.log = lambda *_, **__: None
        self.has_skipped_step = lambda: False
        self.strategy.device, self._replicas = _CPU, replicas

    def _data_replica(self) -> tuple[int, int]:
        return self._replicas, 0


def trace(
    plan: Plan, build: Callable[[], TrainingModule], batches: Sequence[Any], is_fake: bool = True
) -> Trace:
    """Trace a step of each batch; the first one lets optimizers create their states.

    Args:
        plan: Of the run, with its strategy; one with a process group has the ranks of its layout.
        build: Creates the module.
        batches: Two micro-batches on the CPU.
        is_fake: Whether tensors are fake; otherwise real steps are made.
    """
    torch.set_num_threads(1)
    gc.disable()  # it takes long, and would make what is alive depend on when it runs
    options, strategy, live = plan.options, plan.strategy, Live(fake.ANSWERS if is_fake else {})
    precision = Precision(str(options.precision), "cpu")
    precision.scaler = None  # a scale, whose value would say that steps are skipped
    with contextlib.ExitStack() as stack:
        if isinstance(strategy, ProcessGroupStrategy):
            stack.enter_context(fake.group())
        strategy.connect(plan.layout, [_CPU], precision)
        stack.callback(strategy.teardown)
        if is_fake:
            stack.enter_context(fake.tensors())
        stack.enter_context(live.counting())
        module = build()
        module.train()
        run = PlannedRun(plan, strategy.data.replicas, batch_length(batches[0]))
        stack.enter_context(run.attached(module, "fit", None))
        elements = sum(each.numel() for each in module.parameters())
        numels = [each.numel() for each in module.parameters() if each.requires_grad]
        unit = _largest_unit(module, plan.device.type != "cpu")
        parts, mode = options.activation_checkpointing, options.activation_checkpointing_mode
        stack.enter_context(activation_checkpointing.applied(module, parts, mode))
        steps = _Steps(plan, module, run, live)
        found = steps.sizes(batches)
        groups = [group for each in steps.optimization.optimizers for group in each.param_groups]
        rates = [float(group["lr"]) for group in groups if "lr" in group]
    one, two = (replace(each, numels=numels, unit=unit) for each in found)
    return Trace(one, two, sorted(live.asked), rates, elements)


def _largest_unit(module: TrainingModule, on_gpus: bool) -> int:
    """The bytes of the largest unit that ``fsdp`` would gather."""
    units = choose_units(module, None, _UNIT, whole_blocks=on_gpus)
    gathered = [list(unit.parameters()) for _, unit in units]
    inside = {id(each) for unit in gathered for each in unit}
    gathered.append([each for each in module.parameters() if id(each) not in inside])
    return max(sum(each.numel() * each.element_size() for each in unit) for unit in gathered)


class _Steps:
    """The steps of a rank."""

    def __init__(self, plan: Plan, module: TrainingModule, run: PlannedRun, live: Live) -> None:
        self.strategy, self.options, self.live = plan.strategy, plan.options, live
        on_gpus = plan.device.type != "cpu"
        has_peers = isinstance(self.strategy, ProcessGroupStrategy)
        if self.options.sync_batchnorm and not has_peers:
            sync_batchnorm.convert(module, "cpu")
        if isinstance(self.strategy, FSDP):
            fake.place(self.strategy, on_gpus)
        self.optimization = self.strategy.setup(module, lambda: configured(module))
        for optimizer in self.optimization.optimizers if on_gpus else ():
            for group in (*optimizer.param_groups, optimizer.defaults):
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # as torch does on GPUs, in one operation for all
        if isinstance(self.strategy, ProcessGroupStrategy):
            self.strategy.averaged = None  # it would compare gradients, in copies of some
        self.manual: ManualOptimization | None = None
        if not module.automatic_optimization:
            context = run.recorder.context
            self.manual = ManualOptimization(self.strategy, self.optimization, lambda: context)
            run.manual = self.manual
        live.watch(module.parameters())

    def sizes(self, batches: Sequence[Any]) -> list[Sizes]:
        """The sizes at each batch."""
        gc.collect()
        parameters = self.live.total
        # Modules with manual optimization may step in some of the batches only.
        for number in range(0 if self.manual is None else 4):
            self._step(batches[0], number)
        steps = [self._step(batch, 4 + number) for number, batch in enumerate(batches)]
        gc.collect()
        return [
            Sizes(
                parameters=parameters,
                gradients=max(own for own, _ in seen),
                optimizer=self.live.total - parameters,
                moments=moments(seen),
                step=steps[-1][1],  # the first one makes states
                numels=[],
            )
            for seen, _ in steps
        ]

    def _step(self, batch: Any, number: int) -> tuple[list[tuple[int, int]], int]:
        """Make a step; its moments, and the temporary results of optimizers."""
        live, options = self.live, self.options
        gc.collect()
        before = live.total
        live.begin()
        parts = min(options.accumulate_grad_batches, 2)  # from the second on, they are alike
        for part in range(1, parts + 1):
            own = mapped(batch, lambda each: each.clone() if isinstance(each, Tensor) else each)
            if self.manual is None:
                self.strategy.forward_backward(own, number, weight=1.0, synchronize=part == parts)
            else:
                self.manual.run(own, number)
            del own
        live.find_gradients()
        seen = [(own, other - before) for own, other in live.moments.items()]
        live.begin()
        held = live.total
        if self.manual is None:
            if options.gradient_clip_val is not None:
                algorithm = options.gradient_clip_algorithm
                self.strategy.clip(self.optimization, options.gradient_clip_val, algorithm)
            self.strategy.step(self.optimization)
        return seen, live.most - held
