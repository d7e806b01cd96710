"""Scales learning rates with the effective batch size, after a linear warm-up."""

from dataclasses import dataclass

from ..errors import ConfigurationError
from ..options import Options


@dataclass(frozen=True)
class LearningRateScaling:
    """Scales learning rates, because a batch is larger than the one they were chosen for.

    The factor is applied on top of optimizers and schedulers, which do not see it.

    Args:
        rule: ``"none"``; ``"linear"``: proportional to the batch size (Goyal et al. 2017,
            https://arxiv.org/abs/1706.02677); ``"sqrt"``: to its square root (Krizhevsky 2014,
            https://arxiv.org/abs/1404.5997).
        reference_batch_size: The effective batch size for which the learning rates were chosen;
            ``None``: the batch size of one device.
        warmup_steps: Linear warm-up steps from a factor of 1 to the final factor.
    """

    rule: str = "none"
    reference_batch_size: int | None = None
    warmup_steps: int = 0

    def target(self, batch_size: int | None, device_batch_size: int | None) -> float:
        """The factor after the warm-up; batch sizes are ``None`` if unknown.

        Raises:
            ConfigurationError: A batch size that the rule needs is unknown.
        """
        if self.rule == "none":
            return 1.0
        reference = self.reference_batch_size or device_batch_size
        if batch_size is None or reference is None:
            raise ConfigurationError(
                f"learning_rate_scaling={self.rule!r}: the loader's batch size is unknown; "
                "scale the rate in configure_optimizers"
            )
        ratio = batch_size / reference
        return ratio if self.rule == "linear" else ratio**0.5

    def factor(self, target: float, step: int) -> float:
        """The factor at a step, counted from 0."""
        if step >= self.warmup_steps:
            return target
        return 1.0 + (target - 1.0) * (step + 1) / self.warmup_steps

    @classmethod
    def of(cls, options: Options) -> "LearningRateScaling":
        """Create the scaling of the options.

        Raises:
            ConfigurationError: There is no reference batch size.
        """
        rule, reference = options.learning_rate_scaling, options.reference_batch_size
        if rule != "none" and options.global_batch_size is not None and reference is None:
            raise ConfigurationError(
                f"learning_rate_scaling={rule!r} with global_batch_size: give "
                "reference_batch_size, the batch that the rate was chosen for"
            )
        return cls(rule, reference, options.learning_rate_warmup_steps)
