"""Make the render a git repository with one commit, without empty folders; nothing else.

Cookiecutter runs this file in the new project's folder, after rendering it as a template: so it
holds no answer and no brace pair that Jinja would read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "cookiecutter-distributed-torch"
# The only GIT_ variables that pass: who commits, and where their settings lie. All others (GIT_DIR,
# GIT_WORK_TREE, GIT_INDEX_FILE, …) could send the commit to another repository.
KEPT = (
    "GIT_AUTHOR_",
    "GIT_COMMITTER_",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
    "GIT_CONFIG_NOSYSTEM",
)
# No hooks, signatures, ignore lists or changed line ends from the user's settings: the commit holds
# the render as it is, and nothing waits for a passphrase.
PLAIN = (
    *("-c", f"core.hooksPath={os.devnull}"),
    *("-c", f"core.excludesFile={os.devnull}"),
    *("-c", "core.autocrlf=false"),
    *("-c", "commit.gpgSign=false"),
)
# Cookiecutter takes a name that is empty under a condition for files only, and makes these folders
# where all their files are left out. They are removed if they are empty.
CONDITIONAL = (".github/workflows", ".github")


def git(*arguments: str) -> str:
    """Run git here and return what it prints; raise if it fails."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith(KEPT)
    }
    done = subprocess.run(
        ["git", *arguments], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


def identity() -> list[str]:
    """Return settings for what is missing of the user's own name and address."""
    settings: list[str] = []
    for key, stand_in in (("user.name", NAME), ("user.email", f"{NAME}@localhost")):
        try:
            git("config", "--get", key)
        except subprocess.CalledProcessError:
            settings += ["-c", f"{key}={stand_in}"]
    return settings


def main() -> None:
    """Commit the render on a branch called main."""
    for folder in CONDITIONAL:
        with contextlib.suppress(OSError):  # it holds something, or is not there
            Path(folder).rmdir()
    if Path(".git").exists():  # rendered over an existing project: its history is its owner's
        return
    if shutil.which("git") is None:
        print(
            "note: git is not installed, so the project is not a git repository yet",
            file=sys.stderr,
        )
        return
    try:
        git("init", "--quiet", "--template=")
        git("symbolic-ref", "HEAD", "refs/heads/main")  # git before 2.28 has no --initial-branch
        git(*PLAIN, "add", "--all")
        git(*PLAIN, *identity(), "commit", "--quiet", "--message", f"Start from {NAME}")
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        print(
            f"note: the project is complete, but git could not commit it: {said}", file=sys.stderr
        )


if __name__ == "__main__":
    main()
