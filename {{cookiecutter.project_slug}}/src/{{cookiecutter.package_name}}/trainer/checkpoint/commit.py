"""Which commit a run is of. git is asked so that nothing runs which the repository asks it to run.

A repository's own configuration may name programs: a monitor of files, hooks, filters, and what
fetches missing objects. A run in a folder that somebody else has made must start none of them.
"""

import os
import subprocess
from collections.abc import Mapping
from typing import Any

_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.attributesFile": os.devnull,
    "protocol.allow": "never",
}
# As git config --show-scope calls the files that lie in the repository.
_OWN_SCOPES = ("local", "worktree")


def read() -> dict[str, Any] | None:
    """The commit of the working directory and whether it has changes; ``None`` where none is known.

    In a container without git it is the commit that the image was built from.
    """
    try:
        commit = _ask(_SETTINGS, "rev-parse", "--verify", "HEAD").strip()
        settings = _SETTINGS | _without_filters()
        # In a submodule git would read that one's own configuration.
        changes = _ask(settings, "status", "--porcelain", "--ignore-submodules=dirty")
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return _of_image()


def _ask(settings: Mapping[str, str], *arguments: str) -> str:
    """What git prints, with settings that win over the repository's."""
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    command = ["git", *words, *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return done.stdout


def _without_filters() -> dict[str, str]:
    """Settings that switch off the filters which the repository itself brings.

    Those of the user's own configuration stay: without git-lfs each of its files is a change.
    """
    words = _ask(_SETTINGS, "config", "--list", "--show-scope", "--null").split("\0")
    settings: dict[str, str] = {}
    for scope, entry in zip(words[::2], words[1::2], strict=False):
        name = entry.partition("\n")[0]
        if scope in _OWN_SCOPES and name.startswith("filter."):
            if "=" in name:
                raise subprocess.SubprocessError(f"git -c cannot set {name}")
            driver = name.rpartition(".")[0]
            settings |= {f"{driver}.{each}": "" for each in ("clean", "process")}
            settings[f"{driver}.required"] = "false"
    return settings


def _of_image() -> dict[str, Any] | None:
    """What a container's image was built from; there is no git in it."""
    commit = os.environ.get("IMAGE_COMMIT")
    if not commit:
        return None
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
