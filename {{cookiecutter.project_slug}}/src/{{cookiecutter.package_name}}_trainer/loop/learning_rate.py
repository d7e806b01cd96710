"""Scale learning rates with the effective batch size, after a linear warm-up.

The factor is applied on top of optimizers and schedulers, which do not see it.
"""

from ..errors import ConfigurationError
from ..options import Options


def scaled(options: Options, batch_size: int | None, device_batch_size: int | None) -> float:
    """The factor of the learning rates after the warm-up; batch sizes are ``None`` if unknown.

    ``learning_rate_scaling`` is ``"none"``; ``"linear"``: proportional to the batch size (Goyal et
    al. 2017, https://arxiv.org/abs/1706.02677); or ``"sqrt"``: to its square root (Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997).

    Raises:
        ConfigurationError: A batch size that the rule needs is unknown.
    """
    rule = options.learning_rate_scaling
    if rule == "none":
        return 1.0
    reference = options.reference_batch_size or device_batch_size
    if batch_size is None or reference is None:
        raise ConfigurationError(
            f"learning_rate_scaling={rule!r}: the loader's batch size is unknown; scale the rate "
            "in configure_optimizers"
        )
    ratio = batch_size / reference
    return ratio if rule == "linear" else ratio**0.5


def warmed_up(target: float, warmup_steps: int, step: int) -> float:
    """The factor at a step, counted from 0: it rises or falls from 1 in a straight line."""
    if step >= warmup_steps:
        return target
    return 1.0 + (target - 1.0) * (step + 1) / warmup_steps
