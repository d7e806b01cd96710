"""Averages of the weights: validations use them, checkpoints contain them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checkpoint import AVERAGE, read_all
from ..errors import UserError
from ..launch import output
from ..module import Run, TrainingModule, Weights
from .callback import Callback, check, checked

_WIDER = dict.fromkeys((torch.bfloat16, torch.float16), torch.float32)


class WeightAverage(Callback):
    """An average of the trainable parameters; subclasses call :meth:`update`.

    Validations of the fit use it. Buffers are not averaged. Checkpoints contain it beside the
    weights; what evaluates or exports a checkpoint uses it, unless ``averaged`` is False. It needs
    another copy of this process' parameters or shards, at least in float32; in validations, two.
    """

    needs: ClassVar[tuple[str, ...]] = ("parameter_averaging",)
    _weights: Weights | None = None

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        """The average by parameter name: this process' parts."""
        self.count = 0
        """Number of steps, or of epochs, that were counted."""
        self._trained: dict[str, Tensor] = {}  # the parameters, while the module has their average

    @property
    def weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError(f"{type(self).__name__} averages the weights of a fit only")
        return self._weights

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Change the average to ``(1 - weight) * average + weight * parameter``."""
        new = [name for name in self.weights.trained() if name not in self.average]
        if known := list(self.average):  # also what is frozen now, so that its average reaches it
            averages = [self.average[name] for name in known]
            pairs = zip(self.weights.shards(known), averages, strict=True)
            torch._foreach_lerp_(averages, [shard.to(avg.dtype) for shard, avg in pairs], weight)
        for name, shard in zip(new, self.weights.shards(new), strict=True):
            self.average[name] = shard.to(_WIDER.get(shard.dtype, shard.dtype), copy=True)

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        self._weights, self.average, self.count = trainer.weights(), {}, 0

    @torch.no_grad()
    def on_validation_start(self, trainer: Run, module: TrainingModule) -> None:
        named = zip(self.average, self.weights.shards(self.average), strict=True)
        self._trained = {name: torch.clone(shard) for name, shard in named}
        self.weights.put(self.average)

    @torch.no_grad()
    def on_validation_end(self, trainer: Run, module: TrainingModule) -> None:
        pairs = zip(self.average.items(), self.weights.shards(self.average), strict=True)
        changed = [name for (name, average), shard in pairs if _differs(shard, average)]
        self._restore()
        if changed:
            raise UserError(
                f"{changed[0]} was changed in a validation, in which the module has the average of "
                f"{type(self).__name__}, and the change would be lost: change weights in "
                "on_train_epoch_start or on_train_epoch_end"
            )

    def _restore(self) -> None:
        self.weights.put(self._trained)
        self._trained = {}

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        self._weights = None  # it holds what the strategy closes

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        if self._trained:  # a validation has failed, and the script may go on with its module
            self._restore()
        self._weights = None

    def state_dict(self) -> dict[str, Any]:
        return {AVERAGE: self.weights.state(self.average), "count": self.count}

    def load_stored_state(self, state: Mapping[str, Any]) -> None:
        self.average = self.weights.load(state[AVERAGE])
        self.count = int(read_all(state["count"]))


def _differs(shard: Tensor, average: Tensor) -> bool:
    """Whether weights are no longer the average that was put there; NaN is no difference."""
    return bool(((shard != average.to(shard.dtype)) & ~average.isnan()).any())


class EMA(WeightAverage):
    """Exponential moving average of the trainable parameters: validations of the fit use it.

    After every N steps, ``average = decay * average + (1 - decay) * parameter``; the first average
    is the parameters. With ``warmup``, the decay after ``n`` averages is at most ``(1 + n) / (10 +
    n)``, so that a short run forgets its first weights too. A step that a gradient scaler skips
    does not count. With manual optimization, ``every_n_steps`` counts batches. See
    :class:`WeightAverage` for its memory.

    Sources: https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema and
    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage (``num_updates``)
    """

    @checked
    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, warmup: bool = True) -> None:
        check(
            "EMA",
            (0 <= decay < 1, f"decay={decay!r}: give a number from 0 to below 1"),
            (every_n_steps >= 1, f"every_n_steps={every_n_steps!r}: give at least 1"),
        )
        super().__init__()
        self.decay, self.every_n_steps, self.warmup = decay, every_n_steps, warmup

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        super().on_fit_start(trainer, module)
        trainer.has_skipped_step()  # notes the scale
        if trainer.total_steps is not None and trainer.is_global_zero:
            self._note_short(trainer.total_steps // self.every_n_steps)

    def _note_short(self, averages: int) -> None:
        """Say if the decay does not matter in a fit that is so short."""
        left, reached = self.decay ** max(0, averages - 1), (10 * self.decay - 1) / (1 - self.decay)
        if self.warmup and averages < reached:
            how = f"is reached after {reached:.0f} averages: until then it is (1 + n) / (10 + n)"
        elif not self.warmup and left > 0.01:
            how = f"leaves {left:.0%} of the first weights in the last average: use warmup=True"
        else:
            return
        line = f"note: EMA: this fit makes {averages} averages, and decay={self.decay:g} {how}"
        output.print_lines(line, error=True)

    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        if not trainer.has_skipped_step():
            self.count += 1
            if self.count % self.every_n_steps == 0:
                n = self.count // self.every_n_steps - 1
                self.update(1 - min(self.decay, (1 + n) / (10 + n) if self.warmup else 1.0))


class StochasticWeightAveraging(WeightAverage):
    """Mean of the trainable parameters at the ends of the last epochs.

    Validations of the fit use it from the end of ``start_epoch`` on, counted from 0. It does not
    change learning rates: return ``torch.optim.swa_utils.SWALR`` from ``configure_optimizers``. See
    :class:`WeightAverage` for its memory.

    Source: https://arxiv.org/abs/1803.05407
    """

    @checked
    def __init__(self, start_epoch: int) -> None:
        is_epoch = (start_epoch >= 0, f"start_epoch={start_epoch!r}: give at least 0")
        check("StochasticWeightAveraging", is_epoch)
        super().__init__()
        self.start_epoch = start_epoch

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        super().on_fit_start(trainer, module)
        most = trainer.max_epochs
        is_reached = most is None or self.start_epoch < most or bool(trainer.fast_dev_run)
        line = f"start_epoch={self.start_epoch} is not reached with max_epochs={most}"
        check("StochasticWeightAveraging", (is_reached, line))

    def on_train_epoch_end(self, trainer: Run, module: TrainingModule) -> None:
        if trainer.current_epoch >= self.start_epoch:
            self.count += 1
            self.update(1 / self.count)
