"""Read the git commit of a run."""

import os
import subprocess
from typing import Any

# What a repository's own configuration may name: a run must not start it.
_NOTHING_STARTS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


def read() -> dict[str, Any] | None:
    """The commit of the working directory, and whether it has changes; ``None`` if unknown.

    In a container without git, the commit from which the image was built.
    """
    try:
        commit = _run_git("rev-parse", "--verify", "HEAD").strip()
        changes = _run_git("status", "--porcelain", "--ignore-submodules=dirty")
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        commit = os.environ.get("IMAGE_COMMIT", "")
        dirty = commit.endswith("-dirty")
        return {"commit": commit.removesuffix("-dirty"), "dirty": dirty} if commit else None


def _run_git(*arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", *_NOTHING_STARTS, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout
