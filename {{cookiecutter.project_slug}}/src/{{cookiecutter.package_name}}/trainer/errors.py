"""What a user did wrong, said in one line each and, for a configuration, all at once."""

import difflib
from collections.abc import Iterable, Sequence
from types import TracebackType

_LONGEST, _LONGEST_LINE = 120, 1000


class UserError(Exception):
    """Something the user can mend. Shown without a traceback, one line a problem."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        lines = [problems] if isinstance(problems, str) else problems
        self.problems = [shorten(line, _LONGEST_LINE) for line in lines]
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
    name = name[:_LONGEST]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "; known: " + ", ".join(known)


def shown(value: object) -> str:
    """A value for a line of an error: its ``repr`` in one line, shortened in the middle."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python writes, or an object of the user's
        text = f"<{type(value).__name__}>"
    if " at 0x" in text:
        text = f"<{type(value).__name__}>"
    return shorten(text)


def one_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename is not None else ""
        return shorten(f"{error.strerror}{where}")
    try:
        text = str(error)
    except Exception:  # a user's own error may fail in this, too
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def shorten(text: str, longest: int = _LONGEST) -> str:
    """A text in one line of about so many characters: what is too long is cut out of its middle."""
    text = " ".join(text.splitlines())
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … {text[-half // 2 :]} ({len(text)} characters)"
