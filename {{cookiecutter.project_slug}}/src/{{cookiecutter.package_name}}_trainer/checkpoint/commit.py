"""Read the git commit of a run, without running programs that the repository configures.

A repository's own configuration may name programs: a file-system monitor, hooks, filters, helpers
that fetch missing objects. A run in a folder that somebody else created must not start them.
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
# Scopes of git config --show-scope for files inside the repository.
_OWN_SCOPES = ("local", "worktree")


def read() -> dict[str, Any] | None:
    """The commit of the working directory, and whether it has changes; ``None`` if unknown.

    In a container without git, the commit from which the image was built.
    """
    try:
        commit = _run_git(_SETTINGS, "rev-parse", "--verify", "HEAD").strip()
        settings = _SETTINGS | _without_filters()
        # In a submodule, git would read the submodule's own configuration.
        changes = _run_git(settings, "status", "--porcelain", "--ignore-submodules=dirty")
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return _of_image()


def _run_git(settings: Mapping[str, str], *arguments: str) -> str:
    """Output of a git command, with settings that override the repository's."""
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
    """Settings that disable the filters that the repository itself configures.

    Filters of the user's own configuration are kept: without git-lfs, its files appear changed.
    """
    words = _run_git(_SETTINGS, "config", "--list", "--show-scope", "--null").split("\0")
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
    """The commit from which the container image was built."""
    commit = os.environ.get("IMAGE_COMMIT")
    if not commit:
        return None
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
