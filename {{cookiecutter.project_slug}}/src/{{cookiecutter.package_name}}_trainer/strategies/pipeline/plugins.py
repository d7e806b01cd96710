"""The plugin of older trainers that means a pipeline."""

from collections.abc import Sequence
from typing import Any, ClassVar

from ...arguments.plugin import Plugin

_MODES = {"balance_by_size": "memory", "balance_by_time": "time"}


class RPCSequentialPlugin(Plugin):
    """Older spelling of ``strategy="sequential"``, with its options and its older defaults.

    Args:
        balance: Number of children per stage; default: by what ``balance_mode`` measures.
        microbatches: Number of parts of a batch.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
        balance_mode: ``"balance_by_size"`` or ``"balance_by_time"``.
        options: Other options of the strategy: ``schedule``, ``stages``, …
    """

    strategy: ClassVar[str] = "sequential"

    def __init__(
        self,
        balance: Sequence[int] | None = None,
        microbatches: int = 8,
        checkpoint: str = "except_last",
        balance_mode: str = "balance_by_size",
        **options: Any,
    ) -> None:
        if balance is not None:
            options = {"stages": len(balance), **options}
        chosen = _MODES.get(balance_mode, balance_mode) if balance is None else balance
        super().__init__(
            balance=chosen, microbatches=microbatches, checkpoint=checkpoint, **options
        )
