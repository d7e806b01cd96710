"""``local_sgd``: each rank steps its own copy; the parameters are averaged every N steps.

Source: https://arxiv.org/abs/1805.09767 (local SGD), https://arxiv.org/abs/1808.07217 (post-local
SGD, ``warmup_steps``)
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...checkpoint import MOST_STEPS, check_count, fill
from ...checkpoint.state_file import Packing, unpack
from ...errors import ConfigurationError
from ...launch import collectives
from ...module import TrainingModule
from ..gradients.averaging import GradientAverage
from ..limits import Limits
from ..optimizers import Optimization
from ..replicated.replicated import Replicated

# Parameters are averaged in buckets of at most this size, which bounds the memory for them.
_BUCKET_BYTES = 25 * 2**20
_SHARED, _LOCAL = "averaging", "local_sgd"  # keys in a checkpoint


class LocalSGD(Replicated):
    """Each rank steps its own copy of the model; parameters are averaged every N steps.

    Between two averages ranks exchange nothing. Clipping, the optimizer state and the gradient
    scaler are each rank's own. Evaluation, checkpoints and the end of a fit use the average over
    ranks; training continues with the local parameters. Buffers are rank 0's, as under ``ddp``.

    Args:
        every_n_steps: Optimizer steps between two averages, at least 1.
        warmup_steps: Optimizer steps at the start in which gradients are averaged instead, as
            under ``ddp`` (post-local SGD).
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.

    Raises:
        ConfigurationError: An option is out of range.
    """

    limits: Limits = Limits(
        refused={
            "parameter_averaging": "ranks hold different weights between its own averages; use "
            "strategy='ddp'",
            "log_gradient_norm": "its ranks do not average gradients in each step; leave it out",
            "rollback": "its ranks have own weights and optimizers; use strategy='ddp'",
            "skipping": "its ranks would not skip the same steps; use strategy='ddp'",
            "sync_batchnorm": "ranks would communicate in every forward, and their weights differ; "
            "use strategy='ddp'",
        }
    )
    lacks: ClassVar[Mapping[str, str]] = {
        "find_unused_parameters": "it is not needed: ranks may use different parameters"
    }

    def __init__(
        self, every_n_steps: int = 8, warmup_steps: int = 0, timeout_seconds: float = 600.0
    ) -> None:
        problems = self.problems_of_options(every_n_steps=every_n_steps, warmup_steps=warmup_steps)
        if problems:
            raise ConfigurationError(problems)
        super().__init__(timeout_seconds)
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self._optimizers: Sequence[Optimizer] = ()
        self._steps = 0
        self._has_diverged = False
        """Whether ranks have stepped since their parameters were last equal."""
        self._starts: dict[str, Tensor] = {}
        """The parameters when they were last equal on all ranks."""
        self._own: dict[str, Tensor] = {}
        """This rank's parameters, during an evaluation of the average."""

    @staticmethod
    def problems_of_options(every_n_steps: int, warmup_steps: int) -> list[str]:
        """One line for each option that is out of range."""
        return [
            f"strategy_options.{name}={value!r}: give a whole number of at least {least}"
            for name, value, least in (
                ("every_n_steps", every_n_steps, 1),
                ("warmup_steps", warmup_steps, 0),
            )
            if value < least
        ]

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        self.start_equal((*module.parameters(), *module.buffers()))
        self._steps, self._has_diverged, self._starts, self._own = 0, False, {}, {}
        self._begin_period()
        if self.warmup_steps:
            self.averaged = GradientAverage(module.parameters())
        optimization = configure()
        self._optimizers = optimization.optimizers
        return optimization

    # --- a step ----------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        super().backward(loss, synchronize=synchronize and self._steps < self.warmup_steps)

    def end_step(self) -> None:
        super().end_step()
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
        return {name: each for name, each in named if not _is_integer(each)}

    # --- averages --------------------------------------------------------------------------------

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Make the parameters of all ranks equal, and the buffers."""
        parameters = self._parameters()
        for names, progress in self._progress():
            starts = [self._starts[name] for name in names]
            self.advance(names, starts, progress)
            torch._foreach_copy_([parameters[name] for name in names], starts)
        self.start_equal(self.module.buffers())
        self._has_diverged = False

    def advance(self, names: Sequence[str], starts: list[Tensor], progress: list[Tensor]) -> None:
        """Make a period's first parameters the next period's, in place.

        Args:
            names: Names of some parameters.
            starts: Their values at the start of the period.
            progress: How far they have moved since then, averaged over ranks.
        """
        torch._foreach_add_(starts, progress)

    def _progress(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Give the names of parameters, and how far they have moved, averaged over ranks.

        A difference, not the parameters: it loses less in half precision, and what no rank has
        changed stays the same to the last bit.
        """
        parameters = self._parameters()
        for names in self._buckets(parameters):
            starts = [self._starts[name] for name in names]
            own = torch._foreach_sub([parameters[name].detach() for name in names], starts)
            flat = torch.cat([each.flatten() for each in own])
            dist.all_reduce(flat)
            flat /= collectives.world_size()
            parts = flat.split([each.numel() for each in own])
            yield names, [part.view_as(each) for part, each in zip(parts, own, strict=True)]

    def _buckets(self, parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Divide the names of the parameters that any rank has changed into buckets."""
        # A frozen one too may have been changed, as the average of another in a teacher.
        moved = [
            each.requires_grad or not torch.equal(each, self._starts[name])
            for name, each in parameters.items()
        ]
        moved = collectives.all_reduce(torch.tensor(moved, dtype=torch.int), "max").tolist()
        waiting: dict[tuple[torch.dtype, torch.device], list[str]] = defaultdict(list)
        sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
        for (name, each), is_moved in zip(parameters.items(), moved, strict=True):
            if not is_moved:
                continue
            kind = each.dtype, each.device
            if waiting[kind] and sizes[kind] + each.nbytes > _BUCKET_BYTES:
                yield waiting.pop(kind)
                sizes.pop(kind)
            waiting[kind].append(name)
            sizes[kind] += each.nbytes
        yield from (names for names in waiting.values() if names)

    @torch.no_grad()
    def _put_averages(self) -> dict[str, Tensor]:
        """Replace the parameters by their averages over ranks; return those of this rank."""
        parameters, own = self._parameters(), {}
        for names, progress in self._progress():
            for name, moved in zip(names, progress, strict=True):
                own[name] = parameters[name].detach().clone()
                parameters[name].copy_(self._starts[name] + moved)
        return own

    @torch.no_grad()
    def _put_back(self, own: Mapping[str, Tensor]) -> None:
        parameters = self._parameters()
        for name, each in own.items():
            parameters[name].copy_(each)

    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        if self._has_diverged:
            self._own = self._put_averages()

    def end_evaluation(self) -> None:
        own, self._own = self._own, {}
        self._put_back(own)

    def end_fit(self) -> None:
        if self._has_diverged:
            self._put_averages()
            self._has_diverged = False
        self.start_equal(self.module.buffers())

    # --- checkpoints -----------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        if not self._has_diverged:
            return super().model_state()
        own = self._put_averages()
        state = super().model_state()
        state = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        self._put_back(own)
        return state

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        return {**super().state(optimization), _SHARED: self.shared_state()}

    def shared_state(self) -> dict[str, Any]:
        """State of the averaging that is the same on all ranks."""
        return {"steps": self._steps, "starts": dict(self._starts) if self._has_diverged else {}}

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        super().load_state(state, optimization)
        if optimization is not None:
            # A checkpoint of another strategy has none: all steps are still to come.
            self.load_shared_state(state.get(_SHARED, {"steps": 0, "starts": {}}))

    def load_shared_state(self, saved: Mapping[str, Any]) -> None:
        """Load a state of :meth:`shared_state`, after the parameters.

        On another number of ranks, the period continues from the average.
        """
        self._steps = check_count("steps", saved["steps"], 0, MOST_STEPS)
        self._begin_period()
        self._has_diverged = bool(saved["starts"])
        for name, each in saved["starts"].items():
            fill(self._starts[name], each)

    def rank_local_state(self) -> dict[str, Tensor]:
        state: dict[str, Any] = {"parameters": self._parameters() if self._has_diverged else {}}
        if self.layout.rank != 0:  # rank 0's are in the state that every strategy can load
            state["optimizers"] = [self.optimizer_state(each) for each in self._optimizers]
            state["buffers"] = self._saved_buffers()
            state["precision"] = self.precision.state()
        packing = Packing()
        tree = json.dumps(packing.pack(state, _LOCAL, writes=True)).encode()
        return {**packing.tensors, _LOCAL: torch.frombuffer(bytearray(tree), dtype=torch.uint8)}

    def _saved_buffers(self) -> dict[str, Tensor]:
        saved = self.module.state_dict()
        return {name: each for name, each in self.module.named_buffers() if name in saved}

    def load_rank_local_state(self, state: Mapping[str, Tensor]) -> None:
        if _LOCAL not in state:  # saved by another strategy
            return
        saved = unpack(json.loads(bytes(state[_LOCAL].tolist())), state)
        self._put_back(saved["parameters"])
        if self.layout.rank == 0:
            return
        for optimizer, own in zip(self._optimizers, saved["optimizers"], strict=True):
            self.load_optimizer(optimizer, own)
        for name, buffer in self._saved_buffers().items():
            buffer.copy_(saved["buffers"][name])
        self.precision.load_state(saved["precision"])

    def teardown(self) -> None:
        super().teardown()
        self.averaged, self._optimizers, self._starts, self._own = None, (), {}, {}


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
