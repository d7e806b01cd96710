"""Which strategy a run uses, and which of its features."""

from collections.abc import Sequence

from .. import launch, strategies
from ..callbacks import Callback
from ..errors import Problems
from ..launch.devices import ADDED
from ..options import Options
from ..strategies import Requested, Strategy
from .placement import Placement


def choose(options: Options, placement: Placement, problems: Problems) -> tuple[str, Strategy]:
    """Select a strategy; ``problems`` collects one line per error.

    Returns:
        Its name, and the strategy.
    """
    wanted, own_options = options.strategy, options.strategy_options or {}
    if isinstance(wanted, Strategy):
        if own_options:
            problems.add("strategy_options belong to a strategy's name; this one is already made")
        return type(wanted).__name__, wanted
    layout = placement.layout
    # single_device has no options; those of ddp are kept if an elastic run shrinks to one process.
    is_ddp = bool(own_options) or max(len(placement.devices), layout.world_size) > 1
    chosen = "ddp" if is_ddp else "single_device"
    if placement.accelerator in ADDED:
        chosen = ADDED[placement.accelerator].strategy
    if isinstance(wanted, str) and wanted == "auto":
        in_notebook = launch.is_interactive() and not layout.started_outside
        wanted = "ddp_notebook" if chosen == "ddp" and in_notebook else chosen
    with problems:
        strategy = strategies.create(wanted, own_options)
        return str(wanted), strategy
    # One that causes no other errors, so that only the name is reported.
    return chosen, strategies.create(chosen, {})


def asked(options: Options, placement: Placement, callbacks: Sequence[Callback]) -> Requested:
    """What a run requires of its strategy."""
    used = {
        "sync_batchnorm": options.sync_batchnorm,
        "compile": bool(options.compile),
        "activation_checkpointing": bool(options.activation_checkpointing),
        "log_gradient_norm": options.log_gradient_norm,
        # A gradient scaler skips steps by itself.
        "skipping": options.nonfinite_loss == "skip" and options.precision != "16-mixed",
        "uneven_inputs": options.uneven_inputs == "join",
        "learning_rate_scaling": options.learning_rate_scaling != "none",
    }
    return Requested(
        placement.accelerator,
        str(options.precision),
        len(placement.devices),
        placement.nodes,
        frozenset(name for name, is_used in used.items() if is_used).union(
            *(each.needs for each in callbacks)
        ),
    )
