"""User errors: one line per problem; all problems of a configuration are reported at once."""

import difflib
import errno
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

DISK = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that fails or is full, and not of the path."""
_LONGEST, _LONGEST_LINE = 120, 1000
# Of torch/utils/data/dataloader.py, and of its handler of SIGCHLD.
_WORKER = re.compile(r"DataLoader worker \(pid[^)]*(?:\(s\) [^)]*)?\) [^.]*")


class UserError(Exception):
    """An error the user can fix. Printed without a traceback, one line per problem."""

    code = 2
    """The exit code of a process that it ends."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        lines = [problems] if isinstance(problems, str) else problems
        self.problems = [shorten(line, _LONGEST_LINE) for line in lines]
        super().__init__("\n".join(self.problems))


class ConfigurationError(UserError):
    """The arguments are invalid. Raised before any process starts."""


class CheckpointError(UserError):
    """A checkpoint is missing or corrupt, or contains objects that training did not write."""


class TemporaryError(UserError):
    """The machine, the network or another run was in the way: another try may succeed."""

    code = 75  # EX_TEMPFAIL of sysexits.h


class DiskError(CheckpointError, TemporaryError):
    """A checkpoint cannot be saved, or read."""


class EarlyExit(RuntimeError):
    """User code called ``sys.exit(0)`` before the command had finished, which is a failure."""


class Problems(AbstractContextManager["Problems", bool]):
    """Collects problems, so that all are reported at once.

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

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        if isinstance(error, ConfigurationError):
            self.lines += [problem for problem in error.problems if problem not in self.lines]
        return isinstance(error, ConfigurationError)

    def add(self, line: str) -> None:
        self.lines.append(line)

    def raise_any(self) -> None:
        refuse(self.lines)


def refuse(lines: Sequence[str]) -> None:
    """Raise a :class:`ConfigurationError` with these problems, if there are any."""
    if lines:
        raise ConfigurationError(lines)


def refused(path: object, error: OSError) -> UserError:
    kind = TemporaryError if error.errno in DISK else ConfigurationError
    return kind(f"{path}: cannot be written ({error.strerror})")


def unreadable(line: str, error: Exception) -> CheckpointError:
    """The error of a checkpoint that is damaged, or on a disk that fails."""
    return (DiskError if getattr(error, "errno", 0) in DISK else CheckpointError)(line)


def user_error(problems: Sequence[str], code: int) -> UserError:
    """The error of another process, which has told its problems and its exit code."""
    return (TemporaryError if code == TemporaryError.code else UserError)(problems)


def nearest(name: str, known: Iterable[str], where: str = "") -> str:
    """Say :func:`instead`, suggest similar names, ``"; did you mean 'ddp'?"``, or list all."""
    if where and (advice := instead(where, name)):
        return advice
    known = sorted(known)
    name = name[:_LONGEST]
    if close := difflib.get_close_matches(name, known, n=3, cutoff=0.6):
        return "; did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "; known: " + ", ".join(known)


@dataclass
class Foreign:
    """Names of other trainers and older spellings: none, unless ``legacy/`` is there to be loaded.

    ``advice``: by where a name was used, and the name; ``methods`` of modules; ``types`` of older
    keywords of ``Trainer``; ``keywords`` translates those of a method, some of which are taken.
    """

    load: Callable[[], object] = bool
    advice: Mapping[tuple[str, str], str] = field(default_factory=dict)
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    types: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    keywords: Callable[[str, Collection[str], Mapping[str, Any]], dict[str, Any]] = (
        lambda call, taken, kwargs: dict(kwargs)
    )


foreign = Foreign()


def instead(where: str, name: str) -> str:
    """The end of a line about another trainer's name, ``"; use …"``; empty for other names."""
    if name[:1] != "_":
        foreign.load()
    return f"; {foreign.advice[where, name]}" if (where, name) in foreign.advice else ""


def missing(owner: object, name: str, where: str = "module", known: Iterable[str] = ()) -> Any:
    """An attribute that only other modules have: a method, or AttributeError with advice."""
    end = instead(where, name) or (nearest(name, known) if known and name[0] != "_" else "")
    if where == "module" and name in foreign.methods:
        return MethodType(foreign.methods[name], owner)
    of = f"{type(owner).__name__!r} object"
    of = f"type object {owner.__name__!r}" if isinstance(owner, type) else of
    raise AttributeError(f"{of} has no attribute {name!r}{end}") from None


def shown(value: object) -> str:
    """Format a value for an error message: its ``repr`` in one line, shortened in the middle."""
    text = " at 0x"
    with suppress(Exception):  # an int with too many digits for Python, or a user's object
        text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text else shorten(text)


def one_line(error: BaseException) -> str:
    """An error's message in one line; its type if the message is empty."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename is not None else ""
        return shorten(f"{error.strerror}{where}")
    lines: list[str] = []
    with suppress(Exception):  # str() of a user's exception may fail too
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def lost_worker(error: BaseException) -> str:
    """Torch's message for a DataLoader worker that exited; empty for other errors.

    Its handler of SIGCHLD raises this wherever the main thread is, so code that catches any error
    and continues must raise this one again.
    """
    match = _WORKER.match(str(error)) if isinstance(error, RuntimeError) else None
    return match[0] if match else ""


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shorten(text: str, longest: int = _LONGEST) -> str:
    """Shorten a text to one line of about ``longest`` characters by cutting its middle."""
    text = " ".join(text.splitlines())
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … {text[-half // 2 :]} ({len(text)} characters)"
