"""How batch sizes scale with the number of devices."""

from ..errors import ConfigurationError
from .sampling import BatchPlan


def device_batch_size(global_batch_size: int, replicas: int, accumulate: int) -> int:
    """The batch size of one replica's micro-batch; ConfigurationError if it is no integer."""
    shares = replicas * accumulate
    if global_batch_size < 1 or global_batch_size % shares:
        below = max(1, global_batch_size // shares) * shares
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is not divisible by {replicas} replicas times "
            f"accumulate_grad_batches={accumulate}; the nearest divisible sizes are "
            f"{below} and {below + shares}"
        )
    return global_batch_size // shares


def too_few_samples(plan: BatchPlan, global_batch_size: int | None) -> ConfigurationError:
    """The error for a dataset that has fewer samples than a step takes."""
    given = f"global_batch_size={global_batch_size}"
    if global_batch_size is None:
        given = (
            f"batch_size={plan.batch_size} x {plan.replicas} replicas x "
            f"accumulate_grad_batches={plan.accumulate} = {plan.global_batch}"
        )
    return ConfigurationError(
        f"{given}: an optimizer step takes more samples than the {plan.samples} of the dataset; "
        f"use at most {plan.samples}"
    )
