"""The linters of what is not Python, as the tests run them on renders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(sys.executable).parent


def lint(tool: str, *arguments: str | Path, cwd: Path) -> str:
    """Return what that tool of this environment complains about; nothing if it passes."""
    done = subprocess.run(
        [TOOLS / tool, *arguments],
        cwd=cwd,
        # actionlint hands the scripts in workflows to the shellcheck that it finds.
        env=os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert bool(said.strip()) == bool(done.returncode), said
    return said


def scripts(project: Path) -> list[Path]:
    """Return the shell scripts of a render, relative to its folder."""
    return sorted(path.relative_to(project) for path in project.rglob("*.sh"))


def lint_all(project: Path) -> str:
    """Return all complaints about a render's shell scripts, Dockerfile and GitHub workflows."""
    said = lint("shellcheck", "--external-sources", *scripts(project), cwd=project)
    if (project / "Dockerfile").exists():
        said += lint("hadolint", "Dockerfile", cwd=project)
    workflows = sorted(project.glob(".github/workflows/*.yml"))
    return said + (lint("actionlint", *workflows, cwd=project) if workflows else "")
