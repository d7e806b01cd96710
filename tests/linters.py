"""The linters of what is not Python, as the tests run them on renders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TOOLS = Path(sys.executable).parent


def lint(tool: str, *arguments: str | Path, cwd: Path, stdin: str = "") -> str:
    """Return what that tool of this environment complains about; nothing if it passes."""
    done = subprocess.run(
        [tool, *arguments],
        cwd=cwd,
        # This environment's tools; shellcheck may be the distribution's.
        env=os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = done.stdout + done.stderr
    assert not done.returncode or said.strip()
    return said if done.returncode else ""


def lint_python(project: Path) -> str:
    """Return all complaints about a render's Python files, all checked like the trainer."""
    settings = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]
    ignores = settings["lint"]["per-file-ignores"].items()
    table = ", ".join(f"{json.dumps(name)} = {rules}" for name, rules in ignores if name[0] != "!")
    config = ("--config", f"lint.per-file-ignores = {{{table}}}")
    said = lint("ruff", "check", "--no-cache", *config, ".", cwd=project)
    return said + lint("ruff", "format", "--no-cache", "--check", ".", cwd=project)


def scripts(project: Path) -> list[Path]:
    return sorted(path.relative_to(project) for path in project.rglob("*.sh"))


def lint_all(project: Path) -> str:
    """Return all complaints about a render's shell scripts, Dockerfile and GitHub workflows."""
    said = lint("shellcheck", "--external-sources", *scripts(project), cwd=project)
    if (project / "Dockerfile").exists():
        said += lint("hadolint", "Dockerfile", cwd=project)
    return said + "".join(map(lint_workflow, sorted(project.glob(".github/workflows/*.yml"))))


def lint_workflow(file: Path) -> str:
    """Return all complaints about a workflow of GitHub, without network.

    Of what it may say (its schema), of what strangers could do with it (zizmor), of the scripts in
    it (shellcheck), and of values that nothing sets.
    """
    said = lint(
        "check-jsonschema", "--builtin-schema", "vendor.github-workflows", file, cwd=file.parent
    )
    said += lint("zizmor", "--offline", "--quiet", file, cwd=file.parent)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for job in content["jobs"].values():
        for step in job.get("steps", []):
            options = ("--shell=bash", "-")
            said += lint("shellcheck", *options, cwd=file.parent, stdin=step.get("run", ""))
        said += "".join(f"{name} is not defined\n" for name in _undefined(job))
    return said


def _undefined(job: dict[str, Any]) -> Iterator[str]:
    """Give the values of a matrix that a job uses and does not set."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for name in re.findall(r"\bmatrix\.(\w+)", yaml.safe_dump(job)):
        if name not in matrix:
            yield f"matrix.{name}"
