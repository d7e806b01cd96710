"""How batches, steps and epochs scale with devices: the arithmetic, in one place."""

from .errors import ConfigurationError


def device_batch_size(global_batch_size: int, replicas: int, accumulate: int) -> int:
    """The batch size of one replica's micro-batch.

    Raises:
        ConfigurationError: the global batch cannot be divided so.
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


def total_steps(
    steps_per_epoch: int | None, max_epochs: int | None, max_steps: int | None
) -> int | None:
    """Optimizer steps of a whole run; ``None`` if that cannot be known."""
    bounds = [] if max_steps is None else [max_steps]
    if max_epochs is not None and steps_per_epoch is not None:
        bounds.append(max_epochs * steps_per_epoch)
    return min(bounds, default=None)
