"""Types of options that are numbers within bounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    AtLeastTwo = int
    Below1 = float
    NonNegativeInt = int
    PositiveInt = int
    PositiveNumber = float
else:
    AtLeastTwo = type("AtLeastTwo", (int,), {})
    Below1 = type("Below1", (float,), {})
    NonNegativeInt = type("NonNegativeInt", (int,), {})
    PositiveInt = type("PositiveInt", (int,), {})
    PositiveNumber = type("PositiveNumber", (float,), {})


@dataclass(frozen=True)
class Bounds:
    """What a type stands for: a number, and which ones; ``words`` say it in errors."""

    kind: type[int] | type[float]
    words: str
    contain: Callable[[Any], bool]

    def fit(self, value: object) -> bool:
        """Whether a value is such a number, without conversion."""
        is_number = type(value) is int or (self.kind is float and isinstance(value, float))
        return is_number and self.contain(value)

    def read(self, given: Any) -> int | float:
        """Convert a value of the command line; raises ValueError if it is no such number."""
        value = self.kind(given)
        is_rounded = isinstance(given, float) and value != given
        if isinstance(given, bool) or is_rounded or not self.contain(value):
            raise ValueError(f"{given} is not {self.words}")
        return value


BOUNDS: dict[type, Bounds] = {
    AtLeastTwo: Bounds(int, "int >= 2", lambda value: value >= 2),
    Below1: Bounds(float, "float >= 0 and < 1", lambda value: 0 <= value < 1),
    NonNegativeInt: Bounds(int, "int >= 0", lambda value: value >= 0),
    PositiveInt: Bounds(int, "int >= 1", lambda value: value >= 1),
    PositiveNumber: Bounds(float, "float > 0", lambda value: 0 < value < math.inf),
}
