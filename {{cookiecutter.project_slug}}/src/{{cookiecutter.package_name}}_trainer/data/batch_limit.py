"""How many batches of an epoch are read."""

from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class BatchLimit:
    """A limit to some batches.

    Args:
        option: Name of the option that sets it.
        value: A number of batches, or a fraction: 1.0 is no limit.
    """

    option: str
    value: int | float

    @property
    def is_none(self) -> bool:
        """Whether all batches are read."""
        return type(self.value) is not int and self.value >= 1

    def of(self, batches: int) -> int:
        """The number to read of a number of batches, or of steps; fractions are rounded down.

        Raises:
            UserError: The fraction is less than one of them.
        """
        if type(self.value) is int:
            return min(self.value, batches)
        # Not 2 of 10 for 0.3, because of the last bit of the product.
        limited = int(round(batches * self.value, 6))
        if limited < 1 <= batches:
            raise UserError(
                f"{self.option}={self.value!r}: this fraction of {batches} is less than 1; give a "
                "larger one, or a whole number"
            )
        return limited

    def of_loader(self, batches: int | None, accumulate: int = 1) -> int | None:
        """The number to read of a loader that is read as it is; ``None``: all.

        Args:
            batches: Batches of the loader; ``None`` if unknown.
            accumulate: Batches per optimizer step; a fraction is one of steps.

        Raises:
            UserError: A fraction of a number that is not known.
        """
        if self.is_none:
            return None
        if type(self.value) is int:
            return self.value
        if batches is None:
            raise UserError(
                f"{self.option}={self.value!r}: the loader has no length; give a whole number"
            )
        return self.of(-(-batches // accumulate)) * accumulate


ALL = BatchLimit("", 1.0)
"""No limit."""
