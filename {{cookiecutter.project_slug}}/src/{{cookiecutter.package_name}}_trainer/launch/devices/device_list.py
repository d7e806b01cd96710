"""Parse values of ``devices``."""

import contextlib

from ...errors import ConfigurationError, shown

# A mistyped number must not start that many processes; no node has more GPUs or cores.
_MOST_DEVICES = 1024


def parse_devices(value: int | str | list[int] | None, available: int | None) -> list[int]:
    """Parse a value of ``devices`` into device indices.

    Args:
        value: ``3`` or ``"3"``: the first three; ``-1``, ``"-1"``, ``"auto"``: all;
            ``[1, 3]``, ``"1, 3"``: these; ``"0,"``: device 0.
        available: Number of devices; ``None`` if any number is possible (CPU processes), and
            "all" means one.

    Raises:
        ConfigurationError: A duplicate, a negative number other than -1, an index that does not
            exist, no device at all, or a value of another type. The message names it.
    """
    where = f"devices={shown(value)}"
    indices = _indices(value, where, 1 if available is None else available)
    if not indices:
        raise ConfigurationError(f"{where} is not a device; a run needs at least one")
    if len(indices) > _MOST_DEVICES:
        raise ConfigurationError(
            f"{where}: a node has at most {_MOST_DEVICES}; give a smaller number"
        )
    if min(indices) < 0:
        negative = next(index for index in indices if index < 0)
        raise ConfigurationError(f"{where}: {negative} is not a device; only -1 alone means all")
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ConfigurationError(f"{where} names device {twice} more than once")
    if available is not None and max(indices) >= available:
        there = f"0 to {available - 1}" if available else "none"
        raise ConfigurationError(
            f"{where}: there is no device {max(indices)} here (known: {there})"
        )
    return indices


def _indices(value: int | str | list[int] | None, where: str, all_of: int) -> list[int]:
    given: object = -1 if value is None else value
    if isinstance(value, str):
        text = value.strip()
        if text == "0":
            raise ConfigurationError(
                f"{where} may mean no device or device 0; say [0] for device 0"
            )
        with contextlib.suppress(ValueError):  # refused below
            if text == "auto":
                given = -1
            elif "," in text:
                given = [int(part) for part in text.split(",") if part.strip()]
            else:
                given = int(text)
    if type(given) is int:
        if given == -1:
            return list(range(all_of))
        return [given] if given < 0 else list(range(min(given, _MOST_DEVICES + 1)))
    if isinstance(given, list) and all(type(index) is int for index in given):
        return given
    raise ConfigurationError(f"{where}: give a number, a list of indices, or 'auto'")
