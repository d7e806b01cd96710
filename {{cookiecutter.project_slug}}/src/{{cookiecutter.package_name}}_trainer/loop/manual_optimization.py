"""Manual optimization: ``automatic_optimization = False``."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import dtensors, stored_tensors
from ..logging import BatchContext
from ..module import TrainingModule
from ..options import Options
from ..strategies import Strategy
from ..strategies.base import StepOutput, check_loss, refuse_others
from ..strategies.engine_optimizers import requiring_grad
from ..strategies.gradients import sparse
from ..strategies.limits import FEATURES
from ..strategies.optimizers import Optimization
from .checks import FirstGradients


def problems_of(
    module: TrainingModule, strategy_name: str, strategy: Strategy, options: Options
) -> list[str]:
    """One line for each option, or strategy, that does not support what a module does."""
    name, refused = type(module).__name__, strategy.limits.refused
    unsupported = f"strategy={strategy_name!r} does not support"
    if module.automatic_optimization:
        used = ["skipped_batches"] * module.may_skip_batches
        if options.accumulate_grad_batches > 1:
            used += ["skipped_batches_of_a_step"] * module.may_skip_batches
        reasons = [(FEATURES[feature], refused[feature]) for feature in used if feature in refused]
        return [f"{unsupported} {does}, which {name} sets: {why}" for does, why in reasons[:1]]
    does, its = f"{name} uses manual optimization", "clip_gradients of its optimizers"
    reason, accumulates = refused.get("manual_optimization"), options.accumulate_grad_batches != 1
    lines = {
        f"{unsupported} manual optimization, and {does}: {reason}": bool(reason),
        f"gradient_clip_val: {does}; call {its} instead": options.gradient_clip_val is not None,
        f"log_gradient_norm: {does}; log what {its} returns": options.log_gradient_norm,
        f"nonfinite_loss='skip': {does}; do not call step if the loss is not finite on any rank, "
        "and use 'stop'": options.nonfinite_loss == "skip",
        f"accumulate_grad_batches: {does}; let it step in every n-th batch instead": accumulates,
        f"may_skip_batches: {does}; leave it out, and do not call step": module.may_skip_batches,
    }
    return [line for line, is_wrong in lines.items() if is_wrong]


class ManualOptimization:
    """Backward, clipping and optimizer steps, called by the user's training step."""

    def __init__(
        self,
        strategy: Strategy,
        optimization: Optimization,
        context: Callable[[], BatchContext] = BatchContext,
    ) -> None:
        self.strategy, self.context = strategy, context
        self.synchronizes, self.has_stepped = True, False
        self.steps = 0  # of optimizers in this epoch
        self._losses: list[Tensor] = []  # of the current batch
        self.first_gradients = FirstGradients(strategy, optimization)
        self.before_step: Callable[[Optimization], None] = lambda optimization: None
        """Called before an optimizer steps."""
        self.optimizers = [ManualOptimizer(opt, self) for opt in optimization.optimizers]
        self._first_rates, self.rates = optimization.first_rates, optimization.first_rates()
        """With which optimizers step in the current batch; schedulers may have stepped since."""
        self._parameters = optimization.parameters
        self._versions: list[int] = []  # of parameters, when the epoch began

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Compute the gradients of a loss, and average them over ranks unless toggled not to.

        The loss, a mean over this rank's samples, is weighted by their share of the global batch.
        """
        full = dtensors.full(loss)
        check_loss(full, "manual_backward")
        self._losses.append(full.detach())
        with torch.autocast(self.strategy.device.type, enabled=False):
            loss, synchronizes = loss * self.context().weight, self.synchronizes
            self.strategy.backward(loss, synchronize=synchronizes, retain_graph=retain_graph)
        self.first_gradients.note()

    def gradients(self, kind: Callable[[Tensor], bool]) -> dict[str, Tensor]:
        """Gradients of one kind that no step has used yet, by parameter name."""
        named = self.strategy.module.named_parameters()
        grads = {name: p.grad for name, p in named if p.grad is not None and kind(p.grad)}
        return sparse.split_sparse(grads)

    def load_gradients(
        self, sharded: Mapping[str, Any], per_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Restore gradients of :meth:`gradients`: sharded ones, and the mean of each rank's own."""
        module = self.strategy.module
        per_rank = [sparse.join_sparse(gradients, module) for gradients in per_rank]
        for name, parameter in module.named_parameters():
            grads = [gradients[name] for gradients in per_rank if name in gradients]
            if grads and grads[0].is_sparse:
                parameter.grad = sum(grads[1:], grads[0]) / len(per_rank)
            elif grads or name in sharded:
                value = torch.stack(grads).sum(dim=0) / len(per_rank) if grads else sharded[name]
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                stored_tensors.fill(parameter.grad, value)

    def end_epoch(self) -> str:
        """A line if ``step`` was not called in the epoch, unless another method did its work."""
        (steps, before), self.steps, self._versions = (self.steps, self._versions), 0, []
        if steps or not before:
            return ""
        if before == [parameter._version for parameter in self._parameters]:
            return "no step() was called: in manual optimization, training_step calls it"
        is_scaled = self.context().rate_factor != 1.0 or self.strategy.precision.scaler is not None
        why = "weights changed without step(), which scales learning rates and unscales gradients"
        return why if is_scaled else ""

    def run(self, batch: Any, batch_idx: int) -> StepOutput:
        """Run the user's step, which calls the other methods, and end it if it has stepped."""
        self.rates = self._first_rates()
        self._versions = self._versions or [parameter._version for parameter in self._parameters]
        outputs = self.strategy.forward("training", batch, batch_idx)
        refuse_others(outputs)
        if self.has_stepped:
            self.has_stepped = False
            self.strategy.step(Optimization([], []))
        losses, self._losses = self._losses, []
        return StepOutput(losses, [outputs])


class ManualOptimizer:
    """An optimizer whose step applies the strategy and the precision."""

    def __init__(self, optimizer: Optimizer, optimization: ManualOptimization) -> None:
        self.optimizer = optimizer
        self._optimization, self._alone = optimization, Optimization([optimizer], [])

    @property
    def parameters(self) -> list[Tensor]:
        return self._alone.parameters

    def __getattr__(self, name: str) -> Any:
        """As of the optimizer: ``param_groups``, ``zero_grad()``, its ``state`` and more."""
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in ("optimizer", "_optimization", "_alone")
        object.__setattr__(self if is_own else self.optimizer, name, value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer after ``closure``, which computes gradients, and return its result."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        run, alone = self._optimization, self._alone
        [run.rates[run.optimizers.index(self)]] = alone.first_rates()
        run.before_step(alone)
        with alone.rates_multiplied(run.context().rate_factor):
            run.strategy.step(alone, ends=False)
        run.has_stepped, run.steps = True, run.steps + 1
        return loss

    def clip_gradients(self, value: float, algorithm: str = "norm") -> Tensor | None:
        """Clip the gradients of the optimizer's parameters, by ``"norm"`` or ``"value"``.

        Returns:
            The norm before clipping, on the device, to be logged; ``None`` if it is not computed.
            ``clip_gradients(math.inf)`` only computes it.
        """
        return self._optimization.strategy.clip(self._alone, value, algorithm)

    @contextlib.contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Compute gradients only for this optimizer's parameters, in this context.

        Args:
            sync_grad: Average gradients over ranks. False: a later backward averages them too.
        """
        run, own = self._optimization, set(map(id, self.parameters))
        others = [p for other in run.optimizers for p in other.parameters if id(p) not in own]
        synchronizes, run.synchronizes = run.synchronizes, sync_grad
        try:
            with requiring_grad(others, False):
                yield
        finally:
            run.synchronizes = synchronizes
