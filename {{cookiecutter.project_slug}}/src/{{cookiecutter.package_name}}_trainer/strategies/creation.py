"""Creates strategies by name; all errors in their options are reported at once."""

import inspect
import math
from typing import Any

from ..errors import ConfigurationError, Problems, nearest, shown
from ..options import values
from . import registry
from .base import Strategy
from .registration import Entry

# A year: larger values overflow the nanoseconds of C++.
_LONGEST_TIMEOUT = 365 * 24 * 3600


def options_of(cls: type[Strategy]) -> list[str]:
    """The options of a strategy; those of its base classes too, if it takes ``**options``."""
    found: list[str] = []
    for each in cls.__mro__:
        if "__init__" in vars(each):
            parameters = list(inspect.signature(each).parameters.values())
            kinds = {parameter.kind for parameter in parameters}
            named = (p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
            found += named
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                break
    return found


def _instead(entry: Entry, option: object, known: list[str]) -> str:
    if option in entry.lacks:
        return f": {entry.lacks[str(option)]}"
    return nearest(str(option), known) if known else "; it has none"


def create(name: object, options: dict[str, Any]) -> Strategy:
    """Create a strategy by name.

    Args:
        name: A registered name, or a class path.
        options: The strategy's own options.

    Raises:
        ConfigurationError: The name is unknown, or options are unknown or invalid; one line each.
    """
    entry = registry.find(name)
    cls = entry.cls
    known = options_of(cls)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ConfigurationError(
            [
                f"strategy_options: {name} has no option {option!r}"
                + _instead(entry, option, known)
                for option in unknown
            ]
        )
    problems = Problems()
    expected: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        expected |= values.hints(each) if "__init__" in vars(each) else {}
    wrong = values.check(expected, options, problems, "strategy_options.")
    for option, value in options.items():
        if option not in wrong and isinstance(value, float) and not math.isfinite(value):
            problems.add(f"strategy_options.{option}={value!r}: expected a finite number")
    timeout = options.get("timeout_seconds", 1)
    if not problems.lines and not 0 < timeout <= _LONGEST_TIMEOUT:
        problems.add(
            f"strategy_options.timeout_seconds={shown(timeout)}: give a number above 0, of at most "
            f"{_LONGEST_TIMEOUT}"
        )
    for option in (each for each in entry.preset if each in options):
        problems.add(
            f"strategy_options.{option}is set by the strategy's name; use "
            f"strategy={entry.base!r} to choose it"
        )
    problems.raise_any()
    try:
        return entry.make(options)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise values.refused(f"strategy={name!r}", cls, options, error) from None
