"""The scaler of fp16 gradients, of which each process has its share alone."""

from ..precision import Precision


def skip_together(precision: Precision) -> None:
    """Have all processes skip a step where one sees an overflow: each sees a part of the gradients.

    Call it before the first step, and before a process group is formed.
    """
    # Imported now: its default group is the one that there is when it is imported; none means the
    # default one of the moment.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if precision.scaler is not None:
        precision.scaler = ShardedGradScaler(precision.device_type)
