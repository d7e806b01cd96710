"""A logged value that a callback watches."""

import math
from collections.abc import Mapping
from typing import Literal

from ..errors import ConfigurationError, UserError, nearest, shown
from ..launch import collectives

Mode = Literal["min", "max"]


class Monitor:
    """A logged value, and whether it improves.

    Args:
        name: Its name in the logs.
        mode: ``"min"``: lower values are better; ``"max"``: higher ones.
        min_delta: The least change that counts as an improvement.
        owner: The callback, for errors.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(self, name: str, mode: Mode, min_delta: float, owner: str) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"{owner}: mode={shown(mode)}: give 'min' or 'max'")
        if not 0 <= min_delta < math.inf:
            raise ConfigurationError(f"{owner}: min_delta={min_delta!r}: give a number from 0 on")
        self.name, self.mode, self.owner = name, mode, owner
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta

    def read(self, metrics: Mapping[str, float]) -> float:
        """The latest value of the main rank, on every rank, so that all decide the same.

        Raises:
            UserError: There is none.
        """
        if self.name not in metrics:
            known = nearest(self.name, metrics) if metrics else "; nothing was logged"
            raise UserError(f"{self.owner}: no value is logged as {self.name!r}{known}")
        value: float = collectives.broadcast(metrics[self.name])
        return value

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value improves on another one; ``None``, and NaN, are worse than any."""
        if than is None or math.isnan(than):
            return not math.isnan(value)
        return self._sign * (than - value) > self._min_delta
