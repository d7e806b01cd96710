"""Gradient scaler for sharded gradients."""

from ..precision import Precision


def skip_together(precision: Precision) -> None:
    """Skip a step on all ranks if one finds an overflow: each has only its own gradients.

    Call this before the first step, and before the process group is initialized.
    """
    # The import takes the current process group as a default argument. Without one, the default
    # group at the time of the call is used.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if precision.scaler is not None:
        precision.scaler = ShardedGradScaler(precision.device_type)
