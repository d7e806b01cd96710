"""Parse values of ``devices``."""

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
    indices = _indices(value, available)
    where = f"devices={shown(value)}"
    if not indices:
        raise ConfigurationError(f"{where} is not a device; a run needs at least one")
    if len(indices) > _MOST_DEVICES:
        raise ConfigurationError(
            f"{where}: a node has at most {_MOST_DEVICES}; give a smaller number"
        )
    negative = [index for index in indices if index < 0]
    if negative:
        raise ConfigurationError(f"{where}: {negative[0]} is not a device; only -1 alone means all")
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ConfigurationError(f"{where} names device {twice} more than once")
    if available is not None and max(indices) >= available:
        there = f"0 to {available - 1}" if available else "none"
        raise ConfigurationError(
            f"{where}: there is no device {max(indices)} here (known: {there})"
        )
    return indices


def _indices(value: int | str | list[int] | None, available: int | None) -> list[int]:
    if value is None:
        value = "auto"
    if isinstance(value, str):
        return _indices_from_text(value, available)
    if isinstance(value, bool):
        raise ConfigurationError(
            f"devices={shown(value)}: give a number, a list of indices, or 'auto'"
        )
    if isinstance(value, int):
        if value == -1:
            return list(range(1 if available is None else available))
        return [value] if value < 0 else list(range(min(value, _MOST_DEVICES + 1)))
    if isinstance(value, list) and all(type(index) is int for index in value):
        return list(value)
    raise ConfigurationError(f"devices={shown(value)}: give a number, a list of indices, or 'auto'")


def _indices_from_text(text: str, available: int | None) -> list[int]:
    stripped = text.strip()
    if stripped in ("auto", "-1"):
        return list(range(1 if available is None else available))
    if stripped == "0":
        raise ConfigurationError(
            f"devices={text!r} may mean no device or device 0; say [0] for device 0"
        )
    try:
        if "," in stripped:
            return [int(part) for part in stripped.split(",") if part.strip()]
        return _indices(int(stripped), available)
    except ValueError:
        raise ConfigurationError(
            f"devices={shown(text)}: give a number, a list of indices, or 'auto'"
        ) from None
