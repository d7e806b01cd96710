"""Average the weights of many steps exponentially, and validate with the average."""

from ..errors import ConfigurationError
from ..module import Run, TrainingModule
from .weight_average import WeightAverage


class EMA(WeightAverage):
    """Exponential moving average of the trainable parameters: validations of the fit use it.

    After a step, ``average = decay * average + (1 - decay) * parameter``; the first average is the
    parameters after the first such step. A step that a gradient scaler skips does not count. See
    :class:`~.weight_average.WeightAverage` for what it changes, and for its memory.

    Args:
        decay: Part of the average that an update keeps, from 0 to below 1.
        every_n_steps: Number of optimizer steps per update; of batches in manual optimization.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        super().__init__()
        problems = []
        if not 0 <= decay < 1:
            problems.append(f"EMA: decay={decay!r}: give a number from 0 to below 1")
        if every_n_steps < 1:
            problems.append(f"EMA: every_n_steps={every_n_steps!r}: give at least 1")
        if problems:
            raise ConfigurationError(problems)
        self.decay, self.every_n_steps = decay, every_n_steps

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        super().on_fit_start(trainer, module)
        trainer.has_skipped_step()  # notes the scale

    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        if trainer.has_skipped_step():
            return
        self.count += 1
        if self.count % self.every_n_steps == 0:
            self.update(1 - self.decay)
