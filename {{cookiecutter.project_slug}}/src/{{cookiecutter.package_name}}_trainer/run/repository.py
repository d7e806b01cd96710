"""The commit of the working directory, and what was changed since, for ``run.json``."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from ..options import redaction

_MOST_BYTES = 1024 * 1024
_MOST_FILES = 1000
_SECONDS = 10
# A repository's own configuration may name programs: a run must not start them.
_GIT = (
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false"),
    *("-c", f"core.hooksPath={os.devnull}"),
)
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=dirty")
_DIFF = (
    *("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short"),
    *("--ignore-submodules=dirty", "--full-index"),
)


def commit(directory: Path) -> dict[str, Any] | None:
    """The commit of a working directory, and its changes; ``None`` if unknown.

    ``diff`` is that of tracked files, cut after 1 MiB (``diff_cut``), without secrets;
    ``untracked`` names other files that are not ignored. In a container without git, only the
    commit from which the image was built, and whether it had changes.
    """
    found = _of_repository(directory)
    if found is None and (image := os.environ.get("IMAGE_COMMIT", "")):
        found = {"commit": image.removesuffix("-dirty"), "dirty": image.endswith("-dirty")}
    return found


def _of_repository(directory: Path) -> dict[str, Any] | None:
    folders = (directory, *directory.parents)
    if "GIT_DIR" not in os.environ and not any((each / ".git").exists() for each in folders):
        return None  # git is not worth starting
    try:
        variables = _without_filters(directory)
        lines = _output(directory, variables, *_STATUS).split("\0")[:-1]
        changes = [each for each in lines if not each.startswith("# ")]
        untracked = [each.removeprefix("? ") for each in changes if each.startswith("? ")]
        diff = _output(directory, variables, *_DIFF) if len(changes) > len(untracked) else ""
    except (OSError, subprocess.SubprocessError):
        return None
    head = lines[0].removeprefix("# branch.oid ")
    if head == "(initial)":
        return None
    return {
        "commit": head,
        "dirty": bool(changes),
        "diff": redaction.diff(diff[:_MOST_BYTES]),
        "diff_cut": len(diff) > _MOST_BYTES,
        "untracked": untracked[:_MOST_FILES],
    }


def _without_filters(directory: Path) -> dict[str, str]:
    """Variables with which git starts no filter that the repository defines, and no transport."""
    base = {**os.environ, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    listed = ("config", "--show-scope", "--name-only", "-z", "--list")
    entries = _output(directory, base, *listed).split("\0")
    own = {
        name.rpartition(".")[0]
        for scope, name in zip(entries[::2], entries[1::2], strict=False)
        if scope in ("local", "worktree") and name.startswith("filter.")
    }
    off = {"clean": "", "process": "", "required": "false"}
    settings = [(f"{each}.{name}", off[name]) for each in sorted(own) for name in off]
    variables = {"GIT_CONFIG_COUNT": str(len(settings))}
    for index, (name, value) in enumerate(settings):
        variables |= {f"GIT_CONFIG_KEY_{index}": name, f"GIT_CONFIG_VALUE_{index}": value}
    return base | variables


def _output(directory: Path, variables: dict[str, str], *words: str) -> str:
    run = partial(subprocess.run, cwd=directory, env=variables, stdin=subprocess.DEVNULL)
    text = partial(run, encoding="utf-8", errors="replace", capture_output=True)
    return text([*_GIT, *words], check=True, timeout=_SECONDS).stdout
