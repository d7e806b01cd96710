"""``sequential``: pipeline parallelism over the children of ``sequential_module``."""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....checkpoint import ShardedDict
from ....data import moving, randomness
from ....data.samples import Splitter, batch_length, counts_of, part_sizes
from ....errors import refuse
from ....launch import collectives
from ....launch.collectives import How
from ....module import TrainingModule
from ....options import Options
from ....options.values import PositiveInt
from ... import memory
from ...base import STAGES, DataLayout, Stage, StepModule, StepOutput, check_loss
from ...clipping import clip_gradients
from ...engine_optimizers import problems_of, step_alone
from ...gradients import sparse
from ...gradients.averaging import reduce_used
from ...limits import Limits
from ...optimizers import Optimization
from ...process_group import ProcessGroupStrategy
from ...user_code import HookGuard, WeightGuard, forbid_calls, refuse_sharded
from ...weights import LocalWeights
from .division import Shape, measure, problems_of_module
from .partition import Ownership, Processes
from .stages import OwnStage, Step

_REFUSED = {
    "16-mixed": "each stage would have to skip the same steps; use 'bf16-mixed'",
    "skipped_batches": "its stages run at different times; use strategy='fsdp'",
    "manual_optimization": "a pipeline runs forward and backward itself; use strategy='fsdp'",
    "sync_batchnorm": "a stage normalizes micro-batches, at another time than its replicas; use "
    "strategy='ddp'",
    "compile": "a stage is a part of the module; use strategy='fsdp'",
    "uneven_inputs": "all stages must run the same micro-batches; use strategy='fsdp'",
    "activation_checkpointing": "stages checkpoint whole: use strategy_options.checkpoint",
}
_INSTEAD = (
    "other stages have them: use strategy='ddp' or 'fsdp'; training_step may use those that are "
    "attributes of the module itself, too; to clip, set gradient_clip_val"
)


class Sequential(ProcessGroupStrategy):
    """Pipeline parallelism: each process has some children of ``sequential_module``.

    The user's step runs on the first and the last stage: on the first one until it calls
    ``sequential_module``, on the last one with its output. Parameters outside are on both.

    Args:
        stages: Number of processes of a pipeline; default: all. With more processes, data
            parallel: each pipeline reads its part of every batch.
        balance: Number of children per stage, such as ``[3, 1, 4]``; or by what to divide them, so
            that the largest stage is smallest: ``"parameters"``, or ``"time"`` or ``"memory"`` of a
            micro-batch, measured by rank 0 before training.
        microbatches: Number of parts of a batch that pass through the pipeline one after another;
            their sizes differ by at most one.
        schedule: ``"gpipe"``: forwards, then backwards; ``"1f1b"``: alternately, in less memory.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``: of which micro-batches stages
            keep only their inputs, and recompute activations in backward.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(refused=_REFUSED, shards_parameters=True)
    processes: Processes
    ownership: Ownership
    _stage: OwnStage

    def __init__(
        self,
        stages: PositiveInt | None = None,
        balance: Literal["parameters", "time", "memory"] | Sequence[PositiveInt] = "parameters",
        microbatches: PositiveInt = 4,
        schedule: Literal["gpipe", "1f1b"] = "1f1b",
        checkpoint: Literal["never", "except_last", "always"] = "never",
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.shape = Shape(stages, balance, microbatches, schedule, checkpoint)
        self._run_processes, self._splitter = 1, Splitter()

    def replicas(self, devices: int, nodes: int) -> int:
        self._run_processes = processes = super().replicas(devices, nodes)
        refuse(self.shape.problems_with(processes))
        return max(1, processes // self.shape.processes(processes))

    def memory(self, sizes: memory.Sizes) -> memory.Memory:
        cut = 1 / sizes.ranks  # of stages of the same size, with all micro-batches in one
        mine = memory.divided(sizes, parameters=cut, gradients=cut, optimizer=cut).computing(cut)
        mine = replace(mine, step=sizes.step_of(cut))
        work = mine.gradients + mine.activations
        return memory.memory(mine, work=work, mark="unverified", note="stages of the same size")

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if module is None:
            return []
        lines = problems_of_module(module, self.shape, self._run_processes)
        return lines + sparse.problems_of(module, "a pipeline sums gradients as whole tensors")

    def init_process_group(self, layout: Any, device: torch.device) -> None:
        super().init_process_group(layout, device)
        count = self.shape.processes(layout.world_size)
        self.processes = Processes(layout.rank, layout.world_size, count, self.group_timeout)

    @property
    def data(self) -> DataLayout:
        return replace(  # only the process with the last stage logs and predicts
            super().data,
            replicas=self.processes.replicas,
            index=self.processes.replica,
            counts=self.processes.has_last,
        )

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self._place(module)
        # The optimizers get the whole module: other processes' parameters have no gradients here.
        optimization = configure()
        if self.processes.count > 1:
            refuse(problems_of(optimization.optimizers, "parameters", "sequential"))
        for optimizer in optimization.optimizers:
            for p in [p for p in optimizer.state if not self.ownership.is_own(p)]:
                del optimizer.state[p]
        self._divide(module)
        if self.processes.count > 1:
            self.around_hooks = self._guard
        return optimization

    def place(self, module: TrainingModule) -> None:
        self._place(module)
        self._divide(module)

    def _place(self, module: TrainingModule) -> None:
        refuse_sharded(module)
        refuse(problems_of_module(module, self.shape, self.layout.world_size))
        self.module, self.steps = module, dict.fromkeys(STAGES, StepModule(module).forward)
        self.ownership = Ownership(module, self._sizes(module), self.processes)
        self.ownership.materialize()
        tensors = (*module.parameters(), *module.buffers())
        self.precision.cast(filter(self.ownership.is_own, tensors))
        for tensor in filter(self.ownership.is_own, tensors):
            tensor.data = tensor.data.to(self.device)
        self.ownership.equalize(tensors)
        self._shared = self.ownership.shared(module.parameters())

    def _sizes(self, module: TrainingModule) -> list[int]:
        """Number of children of each stage; in evaluation, nothing is measured."""
        stages, run = self.processes.count, module.trainer_state.run
        read_sample = None if run is None else run.read_sample
        if self.shape.balance not in ("time", "memory") or read_sample is None:
            return self.shape.sizes(module, stages)
        batch, sizes = read_sample(), list[int]()
        if self.layout.is_main:
            piece = Splitter().split(batch, self._part_sizes(batch_length(batch)))[0]
            step = functools.partial(module.training_step, piece, 0)
            measured = measure(module, step, self.precision.autocast, self.device)
            sizes = self.shape.measured_sizes(measured, stages)
        return list(collectives.broadcast(sizes))

    def _divide(self, module: TrainingModule) -> None:
        """Free the other processes' part, and connect the stages."""
        self.ownership.free_others(self.device)
        layers = self.ownership.part()
        self._stage = OwnStage(module, layers, self.processes, self.precision, self.device)
        module.trainer_state = replace(module.trainer_state, device=self.device)
        self._guard = HookGuard(module, _INSTEAD, self.ownership.is_own, "some")
        self._weight_guard = WeightGuard("and runs for each micro-batch of a pipeline")

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        run, output = self.module.trainer_state.run, StepOutput([], [])

        def scaled_loss(piece: Any, share: float) -> Tensor:
            outputs = self._forward("training", piece, batch_idx)
            loss = self.read_loss(outputs)
            check_loss(loss, "training_step")
            output.losses.append(loss.detach())
            output.outputs.append(outputs)
            return self.precision.scale(loss * (weight * share))

        sizes = self._part_sizes(batch_length(batch, run.batch_samples if run else None))
        pieces = self._splitter.split(batch, sizes)
        counts = counts_of(self.module, pieces, sizes)
        total = sum(counts) or 1.0  # nothing of the batch may count
        steps = [
            Step(
                functools.partial(scaled_loss, piece, counts[number] / total),
                self._seed(batch_idx, number),
                counts[number],
                self.shape.checkpoints(number, len(sizes)),
            )
            for number, piece in enumerate(pieces)
        ]
        self._stage.train(self.shape.schedule, steps, self._shapes(pieces[0]))
        if synchronize:
            self._reduce_gradients()
        return output

    def _reduce_gradients(self) -> None:
        # Several processes may have a parameter, and each computes a part of its gradient.
        for tensors, group, _ in self._shared:
            reduce_used(tensors, group, 1)
        if (replicas := self.processes.across_replicas()) is not None:
            tensors = list(filter(self.ownership.is_own, self.module.parameters()))
            reduce_used(tensors, replicas, replicas.size())

    def _shapes(self, piece: Any) -> Hashable:
        """What the shapes of tensors between stages depend on."""
        shapes: list[Hashable] = [self.module.training]
        shapes += [parameter.requires_grad for parameter in self.module.parameters()]

        def note(value: Any) -> None:
            if hasattr(value, "shape"):
                shapes.append((tuple(value.shape), value.dtype))
            elif isinstance(value, str | bytes | int | float | None):
                shapes.append(float if isinstance(value, float) else value)
            else:  # unlike any other
                shapes.append(object())

        moving.mapped(piece, note)
        return tuple(shapes)

    def _part_sizes(self, samples: int) -> list[int]:
        return part_sizes(samples, self.shape.count(samples))

    def _seed(self, batch_idx: int, number: int) -> int | None:
        """Seed of what a step draws before the pipeline, on the first and the last process."""
        run = self.module.trainer_state.run
        if run is None or self.processes.count == 1:
            return None
        return randomness.mix(run.seed, run.current_epoch, batch_idx, number, self.data.index)

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        return self._stage.evaluate(Step(functools.partial(self._forward, stage, batch, batch_idx)))

    def _forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        with self._weight_guard.step(self.module, stage), self._guard.weights(f"{stage}_step"):
            return super().forward(stage, batch, batch_idx)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # BatchNorm statistics differ between replicas after training; use those of the first.
        self.ownership.join(self.module.buffers())
        yield

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        parameters = optimization.parameters
        if algorithm == "value" and all(parameter.grad is None for parameter in parameters):
            return None  # a stage may have no parameters, and torch refuses an empty list
        return clip_gradients(parameters, value, algorithm, self._counts)

    def step(self, optimization: Optimization, *, ends: bool = True) -> None:
        super().step(optimization, ends=ends)
        for tensor in itertools.chain.from_iterable(tensors for tensors, _, _ in self._shared):
            if not self.ownership.counts_here(tensor):
                tensor.grad = None  # of one that no optimizer steps; the sum remains on one process

    def step_optimizer(self, optimizer: Optimizer) -> None:
        has_copies = bool(self._shared) or self.processes.replicas > 1
        with self._guard.weights(f"{type(optimizer).__name__}.step"):
            step_alone(optimizer, self.precision, self.device, lambda _: has_copies)

    def _counts(self, parameter: Tensor) -> bool:
        """Whether this process adds a parameter to the norm, and no other one that holds it."""
        return self.ownership.counts_here(parameter) and self.processes.replica == 0

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        if how != "mean":
            return super().reduce(tensor, how)
        counted = tensor if self.processes.has_last else torch.zeros_like(tensor)
        return collectives.all_reduce(counted) / self.processes.replicas

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        # Of what several stages have, the last one's.
        saved, others = super().state(optimization), self._others(self.ownership.counts_here)
        model = {name: value for name, value in saved["model"].items() if name not in others}
        return {
            "model": ShardedDict(model),
            "optimizers": [
                {**item, "state": ShardedDict(self._own(item["state"], self.ownership.counts_here))}
                for item in saved["optimizers"]
            ],
        }

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        # What other processes have keeps its place: names are compared on all.
        others = self._others(self.ownership.is_own)
        model = {name: others.get(name, value) for name, value in state["model"].items()}
        saved = state["optimizers"] if optimization else []
        new = [{**item, "state": self._own(item["state"], self.ownership.is_own)} for item in saved]
        super().load_state({"model": model, "optimizers": new}, optimization)

    def _own(self, values: Mapping[str, Any], holds: Callable[[Tensor], bool]) -> dict[str, Any]:
        """An optimizer's state of the parameters that this process holds."""
        held = {name for name, parameter in self.module.named_parameters() if holds(parameter)}
        return {name: value for name, value in values.items() if name in held}

    def _others(self, holds: Callable[[Tensor], bool]) -> dict[str, Tensor]:
        """What this process does not hold, by name."""
        named = self.module.state_dict(keep_vars=True).items()
        return {name: item for name, item in named if isinstance(item, Tensor) and not holds(item)}

    def weights(self) -> LocalWeights:
        named = self.module.named_parameters(remove_duplicate=False)
        held = [(name, parameter) for name, parameter in named if self.ownership.is_own(parameter)]
        return LocalWeights(held, is_sharded=True)

    def teardown(self) -> None:
        if hasattr(self, "_stage"):
            self._stage.close()
            forbid_calls(self.module)
        self._shared = []
        if hasattr(self, "processes"):
            self.processes.close()
        super().teardown()
