"""Paths as users write them, with ``~`` and ``$HOME``."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, Problems, shown

_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP)


def expanded(
    given: dict[str, Any], instead: Mapping[str, Any], problems: Problems
) -> dict[str, Any]:
    """Values of which those that are paths are expanded.

    Args:
        given: values by name; a path that is ``None`` stays.
        instead: by name of each path, what takes its place where it cannot be expanded.
        problems: takes a line for each that cannot.
    """
    found = dict(given)
    for name, other in instead.items():
        if given[name] is not None:
            found[name] = other
            with problems:
                found[name] = expand(name, given[name])
    return found


def expand(name: str, value: str | os.PathLike[str]) -> str:
    """A path with its home directory and variables in place.

    Args:
        name: of the option, for the error.
        value: as it was given.

    Raises:
        ConfigurationError: a user or a variable does not exist, or no file can have such a path.
    """
    text = os.path.expandvars(os.fspath(value))
    if unset := re.match(r".*\$(\w+|\{[^}]*\})", text, re.DOTALL):
        variable = unset[1].strip("{}")
        raise ConfigurationError(
            f"{name}={shown(value)}: the variable {variable} is not set; set it, or write the path"
        )
    expanded = os.path.expanduser(text)  # noqa: PTH111 (a Path raises where there is no such user)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ConfigurationError(
            f"{name}={shown(value)}: there is no home directory of {user}; write ./{user} for a "
            "folder of that name"
        )
    if not expanded:
        raise ConfigurationError(f"{name}={shown(value)}: give a path")
    try:
        Path(expanded).exists()
        Path(expanded).lstat()
    except ValueError:
        raise ConfigurationError(f"{name}={shown(value)}: no path holds a null byte") from None
    except OSError as error:
        if error.errno in _UNUSABLE:
            raise ConfigurationError(f"{name}={shown(value)}: {error.strerror}") from None
    return expanded
