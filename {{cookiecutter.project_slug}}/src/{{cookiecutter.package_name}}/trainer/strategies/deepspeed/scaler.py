"""The scaler of fp16 gradients where DeepSpeed unscales and steps."""

from ..precision import Precision


def skip_together(precision: Precision) -> None:
    """Have all ranks skip a step if one finds an overflow: each has only a part of the gradients.

    Call it before the first step and before the process group is initialized.
    """
    # The import takes the current process group as a default argument. Without one, the default
    # group at the time of the call is used.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if precision.scaler is not None:
        precision.scaler = ShardedGradScaler(precision.device_type)


def adapt(precision: Precision, overflowed: bool) -> None:
    """Adapt the scale after a DeepSpeed step, as the scaler's own ``update`` does.

    Args:
        precision: Of the run. Without a scaler, nothing is done.
        overflowed: Whether a gradient of the step was not finite.
    """
    scaler = precision.scaler
    if scaler is None:
        return
    state = scaler.state_dict()
    steps = 0 if overflowed else state["_growth_tracker"] + 1
    factor = state["backoff_factor"] if overflowed else 1.0
    if steps == state["growth_interval"]:
        steps, factor = 0, state["growth_factor"]
    scaler.load_state_dict({**state, "scale": state["scale"] * factor, "_growth_tracker": steps})
