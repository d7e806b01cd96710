"""Gradients across ranks: averaging, sparse gradients, and ranks that use other parameters.

Several strategies use what is here. Imports ``checkpoint``, ``launch`` and ``errors``, and no
strategy.
"""

ELSEWHERE = (
    "use strategy='fsdp' or 'ddp', with --trainer.strategy_options.find_unused_parameters true"
)
"""For strategies whose ranks must use the same parameters."""
