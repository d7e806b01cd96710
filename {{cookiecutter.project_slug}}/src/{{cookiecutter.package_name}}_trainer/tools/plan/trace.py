"""Traces training steps of one rank, with its own strategy: what is alive at each moment."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from ...data.moving import mapped
from ...loop import ManualOptimization
from ...memory import activation_checkpointing
from ...module import TrainingModule
from ...run.plan import Plan
from ...run.rank import RankRun
from ...strategies import Strategy, sync_batchnorm
from ...strategies.fsdp.units import choose_units
from ...strategies.memory import Sizes, moments
from ...strategies.optimizers import Optimization, configured
from ...strategies.precision import Precision
from ...strategies.process_group import ProcessGroupStrategy
from ...strategies.sharded_optimizers import constructor_options
from . import fake
from .live import Live

_CPU = torch.device("cpu")
_UNIT = 1_000_000


@dataclass(frozen=True)
class Job:
    """What is traced.

    Args:
        plan: Of the run, with its strategy.
        build: Creates the module.
        sample: A micro-batch on the CPU, and ``samples`` its number of samples.
        batches: Two numbers of samples of a micro-batch to trace.
        is_fake: Whether tensors are fake; otherwise real steps are made.
        has_peers: Whether the ranks of the plan's layout share a process group.
    """

    plan: Plan
    build: Callable[[], TrainingModule]
    sample: Any
    samples: int
    batches: tuple[int, int]
    is_fake: bool = True
    has_peers: bool = False


@dataclass(frozen=True)
class Trace:
    """The sizes of a rank at the two batches, and what else a trace tells.

    ``asked``: operators that waited for values; ``buffers``: bytes of them; ``rates``: learning
    rates of the optimizers; ``parameters``: number of elements of all.
    """

    one: Sizes
    two: Sizes
    asked: Sequence[str]
    rates: Sequence[float]
    parameters: int


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
        self._replicas = replicas

    def _data_replica(self) -> tuple[int, int]:
        return self._replicas, 0


def trace(job: Job) -> Trace:
    """Trace training steps; the first ones let optimizers create their states."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that later collections are quick
    plan, strategy, live = job.plan, job.plan.strategy, Live(fake.ANSWERS if job.is_fake else None)
    options, layout = plan.options, plan.layout
    precision = Precision(str(options.precision), "cpu")
    precision.scaler = None  # a scale, whose value would say that steps are skipped
    with contextlib.ExitStack() as stack:
        if job.has_peers:
            stack.enter_context(fake.group())
        strategy.connect(layout, [_CPU], precision)
        stack.callback(strategy.teardown)
        if job.is_fake:
            stack.enter_context(fake.tensors())
        stack.enter_context(live)
        module = job.build()
        module.train()
        run = PlannedRun(plan, strategy.data.replicas, job.batches[0])
        module.trainer_state = replace(module.trainer_state, run=run)
        module.setup("fit")
        numels, unit = _counted(module, plan)
        parts, mode = options.activation_checkpointing, options.activation_checkpointing_mode
        stack.enter_context(activation_checkpointing.applied(module, parts, mode))
        steps = _Steps(job, module, run, live)
        found = steps.sizes(numels, unit)
        rates = [float(group["lr"]) for each in steps.optimization.optimizers
                 for group in each.param_groups if "lr" in group]  # fmt: skip
        parameters = sum(each.numel() for each in module.parameters())
        module.trainer_state = replace(module.trainer_state, run=None)
    return Trace(*found, sorted(live.asked), rates, parameters)


def _counted(module: TrainingModule, plan: Plan) -> tuple[list[int], int]:
    """The elements of each trained parameter, and the bytes of the largest unit."""
    on_gpus = plan.device.type != "cpu"
    units = choose_units(module, None, _UNIT, whole_blocks=on_gpus)
    inside = {id(p) for _, unit in units for p in unit.parameters()}
    rest = [p for p in module.parameters() if id(p) not in inside]
    sizes = [_bytes(unit.parameters()) for _, unit in units]
    trained = [each.numel() for each in module.parameters() if each.requires_grad]
    return trained, max([*sizes, _bytes(rest)])


def _bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


class _Steps:
    """The steps of a rank."""

    def __init__(self, job: Job, module: TrainingModule, run: PlannedRun, live: Live) -> None:
        self.job, self.module, self.run, self.live = job, module, run, live
        self.strategy: Strategy = job.plan.strategy
        options, on_gpus = job.plan.options, job.plan.device.type != "cpu"
        if options.sync_batchnorm and not job.has_peers:
            sync_batchnorm.convert(module, "cpu")
        _as_on_gpus(self.strategy, on_gpus)
        self.optimization: Optimization = self.strategy.setup(module, lambda: configured(module))
        for optimizer in self.optimization.optimizers if on_gpus else ():
            for group in (*optimizer.param_groups, optimizer.defaults):
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # as torch does on GPUs, in one operation for all
        # It would compare the ranks' gradients, and is a copy of some at a time.
        if isinstance(self.strategy, ProcessGroupStrategy):
            self.strategy.averaged = None
        self.manual: ManualOptimization | None = None
        if not module.automatic_optimization:
            context = self.run.recorder.context
            self.manual = ManualOptimization(self.strategy, self.optimization, lambda: context)
            run.manual = self.manual
        live.watched = [each for each in module.parameters() if each.requires_grad]
        for each in live.watched:
            each.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.live.add(parameter.grad, is_gradient=True)

    def sizes(self, numels: Sequence[int], unit: int) -> tuple[Sizes, Sizes]:
        """The sizes at both batches."""
        first, second = self.job.batches
        gc.collect()
        parameters = self.live.total
        # Modules with manual optimization may step in some of the batches only.
        for number in range(0 if self.manual is None else 4):
            self._step(first, number)
        steps = [self._step(size, 4 + number) for number, size in enumerate((first, second))]
        gc.collect()
        optimizer = self.live.total - parameters
        flat = max(map(self._flat_step, self.optimization.optimizers), default=0.0)
        found = []
        for seen, gradients, _ in steps:
            found.append(
                Sizes(
                    parameters=parameters,
                    gradients=gradients,
                    optimizer=optimizer,
                    moments=moments(seen),
                    step=steps[1][2],  # the first one makes states
                    flat_step=flat,
                    numels=numels,
                    unit=unit,
                    devices=self.run.plan.layout.local_world_size,
                    nodes=self.run.plan.layout.num_nodes,
                    accelerator=self.run.plan.device.type,
                )
            )
        return found[0], found[1]

    def _flat_step(self, optimizer: Optimizer) -> float:
        """What an optimizer needs for a single parameter, for each byte of its gradient."""
        one = torch.nn.Parameter(torch.zeros(2**16))
        same = type(optimizer)([one], **constructor_options(optimizer))
        most = 0
        for _ in range(2):  # the first one makes states
            one.grad = torch.zeros(2**16)
            self.live.begin()
            held = self.live.total
            same.step()
            most = self.live.most - held
        return most / (4 * 2**16)

    def _step(self, size: int, number: int) -> tuple[list[tuple[int, int]], int, int]:
        """Make a step; its moments, its gradients, and the temporary results of optimizers."""
        live, options = self.live, self.run.plan.options
        gc.collect()
        before = live.total
        live.begin()
        parts = min(options.accumulate_grad_batches, 2)  # from the second on, they are alike
        for part in range(parts):
            batch = resized(self.job.sample, self.job.samples, size)
            if self.manual is None:
                self.strategy.forward_backward(
                    batch, number, weight=1.0, synchronize=part == parts - 1
                )
            else:
                self.manual.run(batch, number)
            del batch
        live.find_gradients()
        seen = [(own, other - before) for own, other in live.moments.items()]
        gradients = max((own for own, _ in seen), default=0)
        live.begin()
        held = live.total
        if options.gradient_clip_val is not None and self.manual is None:
            algorithm = options.gradient_clip_algorithm
            self.strategy.clip(self.optimization, options.gradient_clip_val, algorithm)
        if self.manual is None:
            self.strategy.step(self.optimization)
        return seen, gradients, live.most - held


def _as_on_gpus(strategy: Any, on_gpus: bool) -> None:
    """Prepare a strategy that sees CPUs to do what it would do on the plan's devices."""
    if hasattr(strategy, "whole_blocks"):
        strategy.whole_blocks = on_gpus
        strategy._skips = lambda asks: False
        strategy.make_mesh = unset_fake_temporarily()(strategy.make_mesh)


def resized(batch: Any, samples: int, size: int) -> Any:
    """A batch of another number of samples, of zeros or of its first samples."""

    def one(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        is_of_samples = tensor.dim() > 0 and tensor.shape[0] == samples
        if is_of_samples and size <= samples:
            return tensor[:size].clone()
        shape = (size, *tensor.shape[1:]) if is_of_samples else tensor.shape
        return torch.zeros(shape, dtype=tensor.dtype)

    return mapped(batch, one)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what user code prints: it would print again in each trace."""
    with contextlib.redirect_stdout(None):
        yield
