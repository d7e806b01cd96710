"""What a user did wrong, said in one line each and, for a configuration, all at once."""

import difflib
from collections.abc import Iterable, Sequence
from types import TracebackType


class UserError(Exception):
    """Something the user can mend. Shown without a traceback, one line a problem."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigurationError(UserError):
    """The arguments cannot be run. Raised before any process starts."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or holds something that training did not write."""


class EarlyExit(RuntimeError):
    """User code has called ``sys.exit(0)`` before its command ended: that is no success."""


class Problems:
    """Collects what is wrong, so that the user hears of everything at once.

    Example::

        problems = Problems()
        with problems:
            devices = parse_devices("1,1", available=8)
        with problems:
            precision = Precision("17-mixed", "cpu")
        problems.raise_any()  # one ConfigurationError that holds both lines
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> "Problems":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, ConfigurationError):
            self.lines.extend(error.problems)
            return True
        return False

    def add(self, line: str) -> None:
        """Note one problem."""
        self.lines.append(line)

    def raise_any(self) -> None:
        """Raise everything that was collected; do nothing if all was well."""
        if self.lines:
            raise ConfigurationError(self.lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say what may have been meant: ``"; did you mean 'ddp'?"``, or else what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "; known: " + ", ".join(known)
