"""How batch sizes, steps and learning rates scale with the number of devices."""

from ..errors import ConfigurationError


def device_batch_size(global_batch_size: int, replicas: int, accumulate: int) -> int:
    """The batch size of one replica's micro-batch.

    Raises:
        ConfigurationError: The global batch size is not divisible.
    """
    shares = replicas * accumulate
    if global_batch_size < 1 or global_batch_size % shares:
        below = max(1, global_batch_size // shares) * shares
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is not divisible by {replicas} replicas times "
            f"accumulate_grad_batches={accumulate}; the nearest divisible sizes are "
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
        f"{given}: an optimizer step takes more samples than the {samples} of the dataset; use at "
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
    steps_per_epoch: int | None, max_epochs: int | None, max_steps: int | None, extra: int = 0
) -> int | None:
    """Optimizer steps of a whole run; ``None`` if unknown.

    ``extra``: by how much the steps that were made before a resume exceed those of this run.
    """
    bounds = [] if max_steps is None else [max_steps]
    if max_epochs is not None and steps_per_epoch is not None:
        bounds.append(max_epochs * steps_per_epoch + extra)
    return min(bounds, default=None)
