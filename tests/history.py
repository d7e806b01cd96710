"""The template's own repository: its earlier commits, and a clone with the working tree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest
from rendering import ROOT, git, template_files

IDENTITY = ("-c", "user.name=x", "-c", "user.email=x@localhost")
# What only code that cruft can render holds: earlier commits refuse it, and so cannot be updated.
CRUFT_CAN_RENDER = '"_template" not in answers'


def missing(reason: str) -> NoReturn:
    """Skip a test for that reason; in CI fail it."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def earlier_commits() -> list[str]:
    """Return all commits of the template that cruft can render, oldest first, with HEAD."""
    if not (ROOT / ".git").exists():
        missing("this is no git repository: there are no earlier commits to update from")
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "true\n":
        missing("this clone is shallow: get the earlier commits by git fetch --unshallow")
    search = (
        *("log", "--reverse", "--format=%H", "-S", CRUFT_CAN_RENDER, "--", "local_extensions.py"),
    )
    first = git(ROOT, *search).splitlines()[0]
    rest = git(ROOT, "rev-list", "--reverse", "--first-parent", f"{first}..HEAD").splitlines()
    return [first, *rest]


def clone_with_working_tree(folder: Path) -> Path:
    """Clone the template, with what stands in its working tree as the newest commit.

    Of a downloaded archive, which has no history, it is the only commit.
    """
    clone = folder / "template"
    if (ROOT / ".git").exists():
        git(folder, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone))
        listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        names = listed.rstrip("\0").split("\0")
    else:
        git(folder, "init", "--quiet", str(clone))
        names = list(map(str, template_files(ROOT)))
    for name in names:
        if (ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
            (clone / name).chmod((ROOT / name).stat().st_mode)
    commit(clone, "The working tree")
    return clone


def commit(repository: Path, message: str) -> None:
    git(repository, "add", "--all")
    git(repository, *IDENTITY, "commit", "--quiet", "--allow-empty", "--message", message)
