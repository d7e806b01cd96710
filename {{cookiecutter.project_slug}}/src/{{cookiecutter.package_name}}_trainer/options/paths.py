"""Expand ``~`` and environment variables in paths."""

import os
import re
from pathlib import Path

from ..errors import ConfigurationError, one_line, shown


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
        raise ConfigurationError(
            f"{name}={shown(value)}: the variable {unset[1].strip('{}')} is not set; set it, or "
            "write the path"
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
        Path(expanded).lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # what reads or writes it says so
    except (OSError, ValueError) as error:  # too long, a circle of links, a null byte
        raise ConfigurationError(f"{name}={shown(value)}: {one_line(error)}") from None
    return expanded
