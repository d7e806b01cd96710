"""Checks that end a fit: of a loss that depends on no parameter, or that is not finite.

``nonfinite_loss`` of the trainer: ``stop`` ends the fit before it overwrites good weights, ``skip``
leaves out steps whose gradients are not finite. Losses are checked on their device, and read only
where a step synchronizes anyway; not with a gradient scaler, which skips steps itself.
"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from ..checkpoint import Checkpoints, dtensors
from ..errors import UserError, shown
from ..launch import collectives, output
from ..module import TrainingModule
from ..options import Options
from ..strategies import Strategy
from ..strategies.optimizers import UNREACHED, Optimization
from .position import Position

# Consecutive skipped steps after which a fit ends: about as many as with a gradient scaler, whose
# scale starts at 32768; this is fairseq's --min-loss-scale.
_MOST_SKIPPED, _SMALLEST_SCALE = 30, 1e-4
_BLOCK = 64  # losses that are checked together: one or two kernels per loss instead of ten


def trained_in_eval_mode(module: TrainingModule, optimization: Optimization) -> list[str]:
    """A line if layers whose parameters are trained are in ``eval()`` mode, which a fit keeps."""
    trained = {id(parameter) for parameter in optimization.parameters if parameter.requires_grad}
    for name, layer in module.named_modules():
        if not layer.training and any(id(parameter) in trained for parameter in layer.parameters()):
            place = f"{name or 'the module'} ({type(layer).__name__})"
            return [f"{place} is trained in eval() mode, without dropout; else call its train()"]
    return []


def explain(error: RuntimeError, *, is_manual: bool) -> None:
    """Add a note to torch's error about a second backward: the trainer has called that one."""
    if not is_manual and "backward through the graph a second time" in str(error):
        does = "the trainer calls backward and step: remove them from training_step"
        error.add_note(f"{does}, or set automatic_optimization = False")


def refuse_returned(returned: object) -> None:
    """Raise UserError for a result of ``on_train_batch_start``: -1 has a meaning in Lightning."""
    if returned is not None:
        line = f"on_train_batch_start returned {shown(returned)}, which skips nothing: return None"
        raise UserError(f"{line}; trainer.stop() ends the fit")


class FirstGradients:
    """Whether a backward has reached a parameter of the optimizers.

    A hook notes parameters whose gradients an engine removes; ``grad`` shows those of parameters
    that an engine computes with other tensors. ``is_waiting``: the check has not been made yet.
    """

    def __init__(self, strategy: Strategy, optimization: Optimization) -> None:
        self._optimization = optimization
        self._has_run, self._is_reached, self.is_waiting = False, False, True
        optimized = set(map(id, optimization.parameters))
        trained = [p for p in strategy.module.parameters() if p.requires_grad]
        # An engine's optimizers may step other tensors than the module's.
        watched = [p for p in trained if id(p) in optimized] or trained
        self._layers = WeakSet(strategy.module.modules())
        # Strategies that shard parameters replace them while they are gathered.
        named = () if strategy.limits.shards_parameters else strategy.module.parameters()
        self._known = {id(parameter): parameter for parameter in named}
        self._module = strategy.module
        self._hook = register_multi_grad_hook(watched, self._reach, mode="any")

    def check_layers(self, *, only_used: bool) -> None:
        """Raise a UserError if user code has added what is not trained with the others.

        ``only_used``: what an optimizer has, or a backward has reached, and not parts that are just
        kept, such as a copy of the model.
        """
        optimized = {*map(id, self._optimization.parameters)}
        is_alone = collectives.world_size() == 1
        for name, layer in self._module.named_modules():
            is_old = layer in self._layers
            for own_name, parameter in layer.named_parameters(recurse=False):
                is_known = id(parameter) in self._known if self._known else is_old
                is_optimized = id(parameter) in optimized
                if is_known or not parameter.requires_grad or (is_alone and is_optimized):
                    continue
                if not only_used or is_optimized or parameter.grad is not None:
                    what = f"parameter {own_name}" if is_old else type(layer).__name__
                    alone = ", or give its parameters to an optimizer by add_param_group" * is_alone
                    raise UserError(
                        f"{name} ({what}) was added after configure_optimizers, and would not be "
                        f"trained: create it in __init__{alone}"
                    )

    def _reach(self, _: Tensor) -> None:
        self._is_reached = True

    def note(self) -> None:
        """Note the gradients that there are after a backward."""
        if self.is_waiting:
            self._has_run = True
            self._is_reached |= any(p.grad is not None for p in self._optimization.parameters)

    def check(self, together: bool = True) -> None:
        """Check once, after a backward: UserError if no parameter was reached.

        ``together``: whether all ranks call this after the same backward: one of them may have a
        loss of no parameter, for example in a mixture of experts.
        """
        if not (self.is_waiting and self._has_run):
            return
        self.is_waiting = False
        self._hook.remove()
        reached = torch.tensor([self._is_reached], dtype=torch.int32)
        if together:
            reached = collectives.all_reduce(reached, "max")
        if not reached.item():
            raise UserError(UNREACHED)


class LossRecord:
    """Records the first step with a non-finite loss, on the device of the losses."""

    def __init__(self, device: torch.device, position: Position, block: int | None = None) -> None:
        self._position = position
        # In double precision, in which a finite loss of another type stays finite.
        self._losses = torch.zeros(block or _BLOCK, dtype=torch.float64, device=device)
        self._steps = torch.zeros_like(self._losses)
        self._slots = list(zip(self._losses.split(1), self._steps.split(1), strict=True))
        self._first = torch.full((1,), math.inf, dtype=torch.float64, device=device)
        self._used = 0

    def note(self, loss: Tensor) -> None:
        """Record a loss, without synchronization."""
        loss_slot, step_slot = self._slots[self._used]
        value = loss.detach()
        loss_slot.copy_(value if value.ndim < 2 else value.reshape(1))
        step_slot.fill_(self._position.global_step + 1)
        self._used += 1
        if self._used == len(self._slots):
            self.first_step()

    def first_step(self) -> Tensor:
        """The first step, counted from 1, with a non-finite loss; infinite without one."""
        steps = torch.where(self._losses.isfinite(), math.inf, self._steps)
        self._first = torch.minimum(self._first, steps.min())
        self._losses.zero_()
        self._used = 0
        return self._first


class NonfinitePolicy:
    """Applies the policy; all ranks call its methods after the same step."""

    def __init__(
        self, strategy: Strategy, options: Options, position: Position, checkpoints: Checkpoints
    ) -> None:
        self._strategy, self._policy = strategy, options.nonfinite_loss
        self._position, self._checkpoints = position, checkpoints
        self._scaler = strategy.precision.scaler
        self._losses: LossRecord | None = None
        if self._policy == "stop" and self._scaler is None:
            block = 1 if "compile" in strategy.limits.always else None
            self._losses = LossRecord(strategy.device, position, block)
        self.note_loss = self._losses.note if self._losses is not None else None
        """Records a loss without synchronization; ``None`` if losses are not checked."""
        self.needs_norm = self._policy == "skip" and self._scaler is None  # in each step, for skips
        self._skipped = self._skipped_in_a_row = self._checked_at = 0

    def skips(self, norm: Tensor | None) -> bool:
        """Whether a step is skipped, because the norm of its gradients is not finite; reads it."""
        if norm is None:  # no batch of the step has gradients
            return False
        if math.isfinite(float(dtensors.full(norm))):
            self._skipped_in_a_row = 0
            return False
        step = self._position.global_step + 1
        self._skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == _MOST_SKIPPED:
            raise UserError(
                f"the gradients of {_MOST_SKIPPED} steps in a row, up to step {step}, are not "
                "finite; lower the learning rate, or resume from an earlier checkpoint"
            )
        if collectives.rank() == 0:
            why = "because its gradients are not finite (NaN or infinite)"
            line = f"step {step} is skipped, {why}; steps skipped so far: {self._skipped}"
            output.print_lines(f"warning: {line}", error=True)
        return True

    def check(self) -> None:
        """Raise UserError if a loss since the last call, or the scaler's scale, is not finite."""
        step = self._position.global_step
        if self._checked_at == step or self._policy == "ignore":
            return
        self._checked_at = step
        if self._scaler is not None and _smallest(self._scaler.get_scale()) < _SMALLEST_SCALE:
            self._stop(
                f"the gradient scaler's scale fell to {self._scaler.get_scale():.1g} by step "
                f"{step}: the losses or gradients of all recent steps were not finite"
            )
        if self._losses is None:
            return
        world_size = collectives.world_size()
        first = _smallest(self._losses.first_step() * world_size + collectives.rank())
        if first < math.inf:
            step, rank = divmod(int(first), world_size)
            self._stop(f"the loss of step {step} is not finite (NaN or infinite) on rank {rank}")

    def check_weights(self, model: Mapping[str, Any]) -> None:
        """Raise UserError if a parameter to be saved is not finite; a loss does not show it.

        Each rank checks what it holds of the trainable ones; others may be infinite on purpose.
        """
        if self._policy == "ignore":
            return
        strategy, step = self._strategy, self._position.global_step
        trained = (name for name, p in strategy.module.named_parameters() if p.requires_grad)
        bounds = largest({name: model[name] for name in trained if name in model})
        bad = next((name for name in bounds if not math.isfinite(bounds[name])), None)
        total = math.nan if bad else math.fsum(bounds.values())
        facts = [math.inf if bad is None else float(collectives.rank()), total, -total]
        least = collectives.all_reduce(torch.tensor(facts, dtype=torch.float64), "min").tolist()
        if (rank := least[0]) < math.inf:
            name = next(reported for reported in collectives.gather(bad) if reported is not None)
            self._stop(
                f"parameter {name} is not finite (NaN or infinite) on rank {int(rank)} after step "
                f"{step}, and is not saved"
            )
        limits, replicas = strategy.limits, strategy.data.replicas
        may_differ = limits.shards_parameters or "asynchronous" in limits.always
        if least[1] != -least[2] and replicas == collectives.world_size() and not may_differ:
            raise UserError(
                f"ranks have different weights after step {step}, and they are not saved: draw "
                "random numbers for them from a torch.Generator that all seed alike, call "
                "self.manual_backward(loss) in manual optimization, and change none in a hook of a "
                "gradient (register_hook), which is that of one rank"
            )

    def _stop(self, text: str) -> NoReturn:
        newest = self._checkpoints.newest()
        last = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
        skip = "set gradient_clip_val, or train on with --trainer.nonfinite_loss skip"
        if not self._strategy.module.automatic_optimization:
            skip = "step only where the loss is finite"
        raise UserError(f"{text}; {last}; lower the learning rate or {skip}")


def largest(tensors: Mapping[str, Any]) -> dict[str, float]:
    """The largest magnitude of each tensor in this process, of those that have any elements."""
    bounds: dict[str, Tensor] = {}
    for name, value in tensors.items():
        local = dtensors.local(value.detach()) if isinstance(value, Tensor) else torch.empty(0)
        if local.numel() and (local.is_floating_point() or local.is_complex()):
            # No copy of large tensors, as isfinite makes, and no difference, which may overflow.
            least, most = torch.aminmax(torch.view_as_real(local) if local.is_complex() else local)
            bounds[name] = torch.maximum(least.double().abs(), most.double().abs())
    numbers = torch.stack([bound.cpu() for bound in bounds.values()]).tolist() if bounds else []
    return dict(zip(bounds, numbers, strict=True))


def _smallest(value: Tensor | float) -> float:
    number = torch.as_tensor(value, dtype=torch.float64)
    return float(collectives.all_reduce(number.reshape(1), "min"))
