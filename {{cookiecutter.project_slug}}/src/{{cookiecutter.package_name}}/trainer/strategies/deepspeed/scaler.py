"""The scaler of fp16 gradients, where DeepSpeed unscales them and steps."""

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


def adapt(precision: Precision, overflowed: bool) -> None:
    """Adapt the scale after a step of DeepSpeed's, as the scaler's own ``update`` would.

    Args:
        precision: of the run; without a scaler there is nothing to do.
        overflowed: some gradient of the step was not finite.
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
