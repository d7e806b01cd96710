"""Expand ``~`` and environment variables in paths."""

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
    """Expand the paths among some values.

    Args:
        given: Values by name; a path that is ``None`` is kept.
        instead: By name of each path, the value to use if it cannot be expanded.
        problems: Collects a line for each path that cannot be expanded.
    """
    found = dict(given)
    for name, other in instead.items():
        if given[name] is not None:
            found[name] = other
            with problems:
                found[name] = expand(name, given[name])
    return found


def expand(name: str, value: str | os.PathLike[str]) -> str:
    """Expand the home directory and environment variables in a path.

    Args:
        name: Name of the option, for errors.
        value: The path as given.

    Raises:
        ConfigurationError: A user or variable does not exist, or the path is not valid.
    """
    text = os.path.expandvars(os.fspath(value))
    if unset := re.match(r".*\$(\w+|\{[^}]*\})", text, re.DOTALL):
        variable = unset[1].strip("{}")
        raise ConfigurationError(
            f"{name}={shown(value)}: the variable {variable} is not set; set it, or write the path"
        )
    expanded = os.path.expanduser(text)  # noqa: PTH111 (Path raises if there is no such user)
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
        raise ConfigurationError(
            f"{name}={shown(value)}: a path must not contain a null byte"
        ) from None
    except OSError as error:
        if error.errno in _UNUSABLE:
            raise ConfigurationError(f"{name}={shown(value)}: {error.strerror}") from None
    return expanded
