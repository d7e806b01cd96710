"""Gradient scaling if DeepSpeed unscales and steps."""

from ..precision import Precision


def adapt(precision: Precision, overflowed: bool) -> None:
    """Update the scale after a DeepSpeed step, like the scaler's own ``update``.

    Args:
        precision: Precision of the run. Without a scaler, nothing is done.
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
