"""Read ``max_time``: a duration in one of several forms."""

import re
from collections.abc import Mapping
from datetime import timedelta

from ..errors import ConfigurationError, shown

_TEXT = re.compile(r"(\d{1,5}):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_UNITS = ("weeks", "days", "hours", "minutes", "seconds")


def read(value: str | timedelta | Mapping[str, float] | None) -> float | None:
    """Convert a duration to seconds.

    Args:
        value: ``"DD:HH:MM:SS"``, a ``timedelta``, or its arguments, such as ``{"hours": 3}``;
            ``None``: no limit.

    Raises:
        ConfigurationError: It is not one of these, or not above 0.
    """
    if value is None:
        return None
    try:
        seconds = _duration(value).total_seconds()
    except (ValueError, OverflowError):
        seconds = 0.0
    if seconds <= 0:
        raise ConfigurationError(
            f"max_time={shown(value)}: give 'DD:HH:MM:SS', or one or more of {', '.join(_UNITS)} "
            "as a dict; above 0"
        )
    return seconds


def _duration(value: str | timedelta | Mapping[str, float]) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        found = _TEXT.fullmatch(value)
        if found is None:
            raise ValueError(value)
        value = dict(zip(_UNITS[1:], map(int, found.groups()), strict=True))
    if not value.keys() <= set(_UNITS):
        raise ValueError(value)
    return timedelta(**value)
