"""The hook makes the render a git repository with one commit, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rendering import ROOT, git

HOOK = ROOT / "hooks" / "post_gen_project.py"


def run_hook(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HOOK)],
        cwd=folder,
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rendered"
    folder.mkdir()
    (folder / "file.txt").write_text("text\n", encoding="utf-8")
    return folder


def test_a_render_is_a_clean_repository_with_one_commit(project: Path) -> None:
    assert git(project, "rev-list", "--all", "--count") == "1\n"
    assert git(project, "branch", "--show-current") == "main\n"
    assert git(project, "status", "--porcelain", "--ignored") == ""
    assert git(project, "fsck", "--strict") == ""


def test_it_removes_a_conditional_folder_only_where_it_is_empty(folder: Path) -> None:
    (folder / ".github" / "workflows").mkdir(parents=True)
    (folder / ".github" / "CODEOWNERS").touch()
    assert run_hook(folder).returncode == 0
    assert git(folder, "ls-files").splitlines() == [".github/CODEOWNERS", "file.txt"]
    assert not (folder / ".github" / "workflows").exists()


def test_it_commits_without_an_identity(folder: Path) -> None:
    done = run_hook(folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    name = "cookiecutter-distributed-torch"
    assert git(folder, "log", "--format=%an <%ae>") == f"{name} <{name}@localhost>\n"


def test_it_uses_the_identity_that_is_configured(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "gitconfig"
    settings.write_text(
        "[user]\nname = O'Brien\nemail = ob@example.ie\n[commit]\ngpgSign = true\n"
        "[core]\nexcludesFile = /dev/stdin\n",
        encoding="utf-8",
    )
    done = run_hook(folder, GIT_CONFIG_GLOBAL=str(settings))
    assert (done.returncode, done.stderr) == (0, "")
    assert git(folder, "log", "--format=%an <%ae>") == "O'Brien <ob@example.ie>\n"


def test_it_leaves_a_repository_named_by_the_environment_alone(
    folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    before = sorted((other / ".git").rglob("*"))
    done = run_hook(
        folder,
        GIT_DIR=str(other / ".git"),
        GIT_WORK_TREE=str(other),
        GIT_INDEX_FILE=str(other / ".git" / "index"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert git(folder, "ls-files") == "file.txt\n"
    assert sorted((other / ".git").rglob("*")) == before


def test_it_runs_no_hook_of_the_user_s(folder: Path, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    hook = hooks / "pre-commit"
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/canary'\nexit 1\n", encoding="utf-8")
    hook.chmod(0o755)
    settings = tmp_path / "gitconfig"
    settings.write_text(f"[core]\nhooksPath = {hooks}\n", encoding="utf-8")
    done = run_hook(folder, GIT_CONFIG_GLOBAL=str(settings))
    assert (done.returncode, done.stderr) == (0, "")
    assert git(folder, "rev-list", "--all", "--count") == "1\n"
    assert not (tmp_path / "canary").exists()


def test_it_says_in_one_line_that_git_is_missing(folder: Path, tmp_path: Path) -> None:
    done = run_hook(folder, PATH=str(tmp_path))
    assert done.returncode == 0
    assert done.stderr == (
        "note: git is not installed, so the project is not a git repository yet\n"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["file.txt"]


def test_it_says_in_one_line_that_git_failed(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "git"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'disk full' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    done = run_hook(folder, PATH=f"{tmp_path}:/bin:/usr/bin")
    assert done.returncode == 0
    assert done.stderr == (
        "note: the project is complete, but git could not commit it: disk full\n"
    )


def test_it_leaves_an_existing_history_alone(folder: Path) -> None:
    git(folder, "init", "--quiet")
    done = run_hook(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert git(folder, "status", "--porcelain") == "?? file.txt\n"


def test_it_holds_no_jinja() -> None:
    text = HOOK.read_text(encoding="utf-8")
    assert not any(mark in text for mark in ("{{", "{%", "{#"))
