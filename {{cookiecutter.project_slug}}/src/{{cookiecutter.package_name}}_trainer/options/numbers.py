"""Types of options that are numbers within a range."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """The numbers that a type allows."""

    text: str
    contains: Callable[[float], bool]

    def __repr__(self) -> str:
        return self.text


def plain_number(value: Any) -> Any:
    """A number of NumPy, also in an array without dimensions, as Python's own; else the value."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    kinds = (kind for kind in (bool, int, float) if isinstance(value, kind))
    return value if (kind := next(kinds, None)) is None else kind(value)


AtLeastTwo = Annotated[int, Range(">= 2", lambda value: value >= 2)]
Below1 = Annotated[float, Range(">= 0 and < 1", lambda value: 0 <= value < 1)]
NonNegativeInt = Annotated[int, Range(">= 0", lambda value: value >= 0)]
PositiveInt = Annotated[int, Range(">= 1", lambda value: value >= 1)]
PositiveNumber = Annotated[float, Range("> 0", lambda value: 0 < value < math.inf)]
