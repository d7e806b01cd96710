"""Expand ``~`` and environment variables in paths."""

import os
import re
from pathlib import Path

from ..errors import ConfigurationError, one_line, shown


def expand(name: str, value: str | os.PathLike[str]) -> str:
    """Expand a path; ConfigurationError, with the option's name, if it is not valid."""
    text = os.path.expandvars(os.fspath(value))
    expanded = os.path.expanduser(text)  # noqa: PTH111 (Path raises if there is no such user)
    line = "" if expanded else "give a path"
    if unset := re.match(r".*\$(\w+|\{[^}]*\})", text, re.DOTALL):
        line = f"the variable {unset[1].strip('{}')} is not set; set it, or write the path"
    elif expanded.startswith("~"):
        user = expanded.partition("/")[0]
        line = f"there is no home directory of {user}; write ./{user} for a folder of that name"
    try:
        Path(expanded).lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # what reads or writes it says so
    except (OSError, ValueError) as error:  # too long, a circle of links, a null byte
        line = line or one_line(error)
    if line:
        raise ConfigurationError(f"{name}={shown(value)}: {line}")
    return expanded
