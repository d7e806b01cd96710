"""Average the weights at the ends of epochs, and validate with the average."""

from ..errors import ConfigurationError
from ..module import Run, TrainingModule
from .weight_average import WeightAverage


class StochasticWeightAveraging(WeightAverage):
    """Mean of the trainable parameters at the ends of the last epochs.

    Validations of the fit use it from the end of ``start_epoch`` on. It does not change learning
    rates: return ``torch.optim.swa_utils.SWALR`` from ``configure_optimizers``. See
    :class:`~.weight_average.WeightAverage` for what it changes, and for its memory.

    Args:
        start_epoch: First epoch, counted from 0, whose last weights are averaged.

    Raises:
        ConfigurationError: The argument is negative.

    Source: https://arxiv.org/abs/1803.05407
    """

    def __init__(self, start_epoch: int) -> None:
        super().__init__()
        if start_epoch < 0:
            raise ConfigurationError(
                f"StochasticWeightAveraging: start_epoch={start_epoch!r}: give at least 0"
            )
        self.start_epoch = start_epoch

    def on_train_epoch_end(self, trainer: Run, module: TrainingModule) -> None:
        if trainer.current_epoch >= self.start_epoch:
            self.count += 1
            self.update(1 / self.count)
