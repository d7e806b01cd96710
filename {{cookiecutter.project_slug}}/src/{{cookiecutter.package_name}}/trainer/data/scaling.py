"""How batch sizes, steps and learning rates scale with the number of devices."""

from dataclasses import dataclass

from ..errors import ConfigurationError, nearest

RULES = ("none", "linear", "sqrt")


@dataclass(frozen=True)
class LearningRate:
    """Scales learning rates, because a batch is larger than the one they were chosen for.

    The factor is applied on top of optimizers and schedulers, which do not see it.

    Args:
        rule: ``"none"``; ``"linear"``: proportional to the batch size (Goyal et al. 2017,
            https://arxiv.org/abs/1706.02677); ``"sqrt"``: to its square root (Krizhevsky 2014,
            https://arxiv.org/abs/1404.5997).
        reference_batch_size: The effective batch size for which the learning rates were chosen.
        warmup_steps: Linear warm-up steps from a factor of 1 to the final factor.

    Raises:
        ConfigurationError: Unknown rule, or a number out of range.
    """

    rule: str = "none"
    reference_batch_size: int | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigurationError(
                f"learning_rate_scaling={self.rule!r} is unknown{nearest(self.rule, RULES)}"
            )
        if self.reference_batch_size is not None and self.reference_batch_size < 1:
            raise ConfigurationError(
                f"reference_batch_size={self.reference_batch_size}: give a number of at least 1"
            )
        if self.warmup_steps < 0:
            raise ConfigurationError(
                f"learning_rate_warmup_steps={self.warmup_steps}: give a number of at least 0"
            )

    def target(self, batch_size: int | None, device_batch_size: int | None) -> float:
        """The factor after the warm-up.

        Args:
            batch_size: The effective batch size; ``None`` if unknown.
            device_batch_size: Default of the reference: the batch size of one device.

        Raises:
            ConfigurationError: A batch size that the rule needs is unknown.
        """
        if self.rule == "none":
            return 1.0
        reference = self.reference_batch_size or device_batch_size
        if batch_size is None or reference is None:
            raise ConfigurationError(
                f"learning_rate_scaling={self.rule!r}: the loader does not tell its batch size; "
                "scale the rate in configure_optimizers"
            )
        ratio = batch_size / reference
        return ratio if self.rule == "linear" else ratio**0.5

    def factor(self, target: float, step: int) -> float:
        """The factor at a step, counted from 0."""
        if step >= self.warmup_steps:
            return target
        return 1.0 + (target - 1.0) * (step + 1) / self.warmup_steps


def device_batch_size(global_batch_size: int, replicas: int, accumulate: int) -> int:
    """The batch size of one replica's micro-batch.

    Raises:
        ConfigurationError: The global batch size is not divisible.
    """
    shares = replicas * accumulate
    if global_batch_size < 1 or global_batch_size % shares:
        below = max(1, global_batch_size // shares) * shares
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} does not divide by {replicas} replicas times "
            f"accumulate_grad_batches={accumulate}; the nearest that do: "
            f"{below} and {below + shares}"
        )
    return global_batch_size // shares


def check_samples(
    samples: int, batch_size: int, replicas: int, accumulate: int, global_batch_size: int | None
) -> None:
    """Check that the batch of a step is not larger than the dataset.

    Raises:
        ConfigurationError: It is larger.
    """
    total = batch_size * replicas * accumulate
    if not 0 < samples < total:
        return
    given = (
        f"global_batch_size={global_batch_size}"
        if global_batch_size is not None
        else f"batch_size={batch_size} x {replicas} replicas x accumulate_grad_batches={accumulate}"
        f" = {total}"
    )
    raise ConfigurationError(
        f"{given}: an optimizer step takes more samples than the {samples} of the data set; use at "
        f"most {samples}"
    )


def check_batches(batches: int | None, accumulate: int) -> None:
    """Check that a loader yields enough batches for one step, if its length is known.

    Raises:
        ConfigurationError: It yields fewer.
    """
    if batches is not None and 0 < batches < accumulate:
        raise ConfigurationError(
            f"accumulate_grad_batches={accumulate}: an optimizer step takes more batches than the "
            f"{batches} of the loader; use at most {batches}"
        )


def total_steps(
    steps_per_epoch: int | None, max_epochs: int | None, max_steps: int | None
) -> int | None:
    """Optimizer steps of a whole run; ``None`` if unknown."""
    bounds = [] if max_steps is None else [max_steps]
    if max_epochs is not None and steps_per_epoch is not None:
        bounds.append(max_epochs * steps_per_epoch)
    return min(bounds, default=None)
