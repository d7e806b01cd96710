"""``local_sgd`` and ``diloco``: ranks step their own copies, which are averaged every N steps.

Sources: https://arxiv.org/abs/1805.09767 (local SGD), https://arxiv.org/abs/1808.07217 (post-local
SGD, ``warmup_steps``), https://arxiv.org/abs/2311.08105 (DiLoCo)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...checkpoint import MOST_STEPS, check_count, fill, from_tensors, to_tensors
from ...launch import collectives
from ...module import TrainingModule
from ...options.values import Below1, NonNegativeInt, PositiveInt, PositiveNumber
from ..gradients.averaging import GradientAverage
from ..limits import Limits
from ..memory import Memory, Sizes, memory
from ..optimizers import Optimization
from ..process_group import ProcessGroupStrategy

_SHARED, _LOCAL = "averaging", "local_sgd"  # keys in a checkpoint


class LocalSGD(ProcessGroupStrategy):
    """Each rank steps its own copy of the model; parameters are averaged every N steps.

    Between two averages ranks exchange nothing. Clipping, the optimizer state and the gradient
    scaler are each rank's own. Evaluation, checkpoints and the end of a fit use the average over
    ranks; training continues with the local parameters. Buffers are rank 0's, as under ``ddp``.

    Args:
        every_n_steps: Optimizer steps between two averages, at least 1.
        warmup_steps: Optimizer steps at the start in which gradients are averaged instead, as
            under ``ddp`` (post-local SGD).
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(
        refused={
            "parameter_averaging": "ranks hold different weights between its own averages; use "
            "strategy='ddp'",
            "log_gradient_norm": "its ranks do not average gradients in each step; leave it out",
            "skipping": "its ranks would not skip the same steps; use strategy='ddp'",
            "sync_batchnorm": "ranks would communicate in every forward, and their weights differ; "
            "use strategy='ddp'",
        }
    )

    def __init__(
        self,
        every_n_steps: PositiveInt = 8,
        warmup_steps: NonNegativeInt = 0,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.every_n_steps, self.warmup_steps = every_n_steps, warmup_steps
        self._reset()

    def _reset(self) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._steps = 0
        self._has_diverged = False
        """Whether ranks have stepped since their parameters were last equal."""
        self._starts: dict[str, Tensor] = {}
        """The parameters when they were last equal on all ranks."""
        self._momenta: dict[str, Tensor] = {}
        """Of the outer optimizer."""

    # Those of plain averages.
    outer_learning_rate = 1.0
    outer_momentum = 0.0

    def memory(self, sizes: Sizes) -> Memory:
        # The parameters with which a period began, and the momentum of the outer optimizer.
        kept = (2 if self.outer_momentum else 1) * sizes.parameters
        return memory(sizes, buckets=kept, mark="unverified")

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        self.start_equal((*module.parameters(), *module.buffers()))
        self._reset()
        self._begin_period()
        if self.warmup_steps:
            self.averaged = GradientAverage(module.parameters())
        optimization = configure()
        self._optimizers = optimization.optimizers
        return optimization

    def teardown(self) -> None:
        super().teardown()
        self._reset()

    # --- a step ----------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        super().backward(loss, synchronize=synchronize and self._steps < self.warmup_steps)

    def step(
        self, optimization: Optimization, *, ends: bool = True
    ) -> Callable[[], dict[str, float]]:
        read_values = super().step(optimization, ends=ends)
        if ends:
            self._end_step()
        return read_values

    def _end_step(self) -> None:
        self._steps += 1
        local = self._steps - self.warmup_steps
        if local == 0:
            self._begin_period()
        elif local > 0:
            self._has_diverged = True
            if local % self.every_n_steps == 0:
                self._synchronize()

    @torch.no_grad()
    def _begin_period(self) -> None:
        """Note the parameters, which are equal on all ranks, and average no gradients from here."""
        for name, parameter in self._parameters().items():
            start = self._starts.setdefault(name, torch.empty_like(parameter, requires_grad=False))
            start.copy_(parameter)
        if self.averaged is not None and self._steps >= self.warmup_steps:
            self.averaged.close()
            self.averaged = None

    def _parameters(self) -> dict[str, Tensor]:
        named = self.module.named_parameters()
        return {name: each for name, each in named if each.is_floating_point() or each.is_complex()}

    # --- averages --------------------------------------------------------------------------------

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Make the parameters of all ranks equal, and the buffers."""
        parameters = self._parameters()
        for name, progress in self._progress():
            self._advance(name, progress)
            parameters[name].copy_(self._starts[name])
        self.start_equal(self.module.buffers())
        self._has_diverged = False

    def _advance(self, name: str, progress: Tensor) -> None:
        """Move the start of a period to that of the next, by the progress averaged over ranks."""
        if self.outer_momentum:
            # The update of torch.optim.SGD(nesterov=True), which subtracts a gradient.
            momentum = self._momenta.setdefault(name, torch.zeros_like(progress))
            momentum.mul_(self.outer_momentum).add_(progress)
            progress = progress.add(momentum, alpha=self.outer_momentum)
        self._starts[name].add_(progress, alpha=self.outer_learning_rate)

    def _progress(self) -> Iterator[tuple[str, Tensor]]:
        """Give parameters that any rank has changed, and how far they have moved, averaged."""
        # Differences lose less in half precision, and keep what no rank has changed bit-equal.
        parameters = self._parameters()
        # A frozen one too may have been changed, as the average of another in a teacher.
        moved = [
            each.requires_grad or not torch.equal(each, self._starts[name])
            for name, each in parameters.items()
        ]
        moved = collectives.all_reduce(torch.tensor(moved, dtype=torch.int), "max").tolist()
        for (name, each), is_moved in zip(parameters.items(), moved, strict=True):
            if is_moved:
                total = collectives.sum_in_place(each.detach() - self._starts[name])
                yield name, total.div_(collectives.world_size())

    def _averages(self) -> Iterator[tuple[str, Tensor]]:
        """Give parameters that any rank has changed in this period, averaged over ranks."""
        for name, progress in self._progress() if self._has_diverged else ():
            yield name, progress.add_(self._starts[name])

    @torch.no_grad()
    def _put_averages(self) -> dict[str, Tensor]:
        """Replace the parameters by their averages over ranks; return those of this rank."""
        parameters, own = self._parameters(), {}
        for name, average in self._averages():
            own[name] = parameters[name].detach().clone()
            parameters[name].copy_(average)
        return own

    @torch.no_grad()
    def _put_back(self, own: Mapping[str, Tensor]) -> None:
        parameters = self._parameters()
        for name, each in own.items():
            parameters[name].copy_(each)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with super().evaluating():
            own = self._put_averages()
            try:
                yield
            finally:
                self._put_back(own)

    def finish(self) -> None:
        self._put_averages()
        self._has_diverged = False
        self.start_equal(self.module.buffers())

    # --- checkpoints -----------------------------------------------------------------------------

    @torch.no_grad()
    def _model_state(self) -> dict[str, Any]:
        """With the averages on rank 0, which writes them: in host memory, one after the other."""
        parameters, writes = self._parameters(), self._layout.is_main
        averages = {id(parameters[name]): each.cpu() for name, each in self._averages() if writes}
        state = self.module.state_dict(keep_vars=True)
        return {name: averages.get(id(each), each) for name, each in state.items()}

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        starts = dict(self._starts) if self._has_diverged else {}
        shared = {"steps": self._steps, "starts": starts, "momenta": dict(self._momenta)}
        return {**super().state(optimization), _SHARED: shared}

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        super().load_state(state, optimization)
        if optimization is None:
            return
        # A checkpoint of another strategy has none: all steps are still to come.
        saved = state.get(_SHARED, {"steps": 0, "starts": {}})
        self._steps = check_count("steps", saved["steps"], 0, MOST_STEPS)
        self._begin_period()
        self._has_diverged = bool(saved["starts"])
        for name, each in saved["starts"].items():
            fill(self._starts[name], each)
        for name, each in saved.get("momenta", {}).items() if self.outer_momentum else ():
            self._momenta[name] = torch.empty_like(self._starts[name])
            fill(self._momenta[name], each)

    def rank_local_state(self) -> dict[str, Tensor]:
        state: dict[str, Any] = {"parameters": self._parameters() if self._has_diverged else {}}
        if self._layout.rank != 0:  # rank 0's are in the state that every strategy can load
            state["optimizers"] = [self._optimizer_state(each) for each in self._optimizers]
            state["buffers"] = self._saved_buffers()
            state["precision"] = self.precision.state()
        return to_tensors(state, _LOCAL)

    def _saved_buffers(self) -> dict[str, Tensor]:
        saved = self.module.state_dict()
        return {name: each for name, each in self.module.named_buffers() if name in saved}

    def load_rank_local_state(self, state: Mapping[str, Tensor]) -> None:
        if _LOCAL not in state:  # saved by another strategy
            return
        saved = from_tensors(state, _LOCAL)
        self._put_back(saved["parameters"])
        if self._layout.rank == 0:
            return
        for optimizer, own in zip(self._optimizers, saved["optimizers"], strict=True):
            self._load_optimizer(optimizer, own)
        for name, buffer in self._saved_buffers().items():
            buffer.copy_(saved["buffers"][name])
        self.precision.load_state(saved["precision"])


class DiLoCo(LocalSGD):
    """``local_sgd`` with an outer optimizer: SGD with Nesterov momentum.

    Its gradient is the average over ranks of how far the parameters have moved in a period,
    negated. With a learning rate of 1 and no momentum, it is ``local_sgd``.

    Args:
        every_n_steps: Optimizer steps between two outer steps, at least 1.
        warmup_steps: Optimizer steps at the start in which gradients are averaged instead, as
            under ``ddp``.
        outer_learning_rate: Above 0.
        outer_momentum: From 0 to below 1.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    def __init__(
        self,
        every_n_steps: PositiveInt = 500,
        warmup_steps: NonNegativeInt = 0,
        outer_learning_rate: PositiveNumber = 0.7,
        outer_momentum: Below1 = 0.9,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(every_n_steps, warmup_steps, timeout_seconds)
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum
