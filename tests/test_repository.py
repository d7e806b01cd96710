"""`make setup` makes a render a git repository with one commit, whatever the user's settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rendering import TEMPLATE, git, make_repository, ran

SCRIPT = TEMPLATE / "requirements" / "repository.sh"
NAME = "cookiecutter-distributed-torch"
MADE = "made a git repository with a first commit\n"
FILES = [".gitattributes", "crlf.txt", "file.txt", "requirements/repository.sh"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small project, in a folder whose name a shell could misread."""
    folder = tmp_path / "it's a $(touch canary)"
    (folder / "requirements").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "requirements")
    (folder / "file.txt").write_bytes(b"$Id$ text\n")
    (folder / "crlf.txt").write_bytes(b"text\r\n")
    (folder / ".gitattributes").write_bytes(b"*.bin binary\n")
    return folder


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "requirements" / "repository.sh"
    return ran(["bash", str(script)], cwd=folder.parent, env=os.environ | environment)


def run_with(folder: Path, settings: str) -> subprocess.CompletedProcess[str]:
    """Run it with that as the user's own settings of git."""
    file = folder.parent / "gitconfig"
    file.write_text(settings, encoding="utf-8")
    return run(folder, GIT_CONFIG_GLOBAL=str(file))


def assert_committed(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Assert that one commit holds the very bytes of all files."""
    assert (done.returncode, done.stdout, done.stderr) == (0, MADE, "")
    assert git(folder, "rev-list", "--all", "--count") == "1\n"
    assert git(folder, "ls-files").splitlines() == FILES
    for name in FILES:
        stored = git(folder, "rev-parse", f"HEAD:{name}")
        assert stored == git(folder, "hash-object", "--no-filters", name), name
    assert not (folder.parent / "canary").exists()


def test_a_render_becomes_a_clean_repository_with_one_commit(project: Path) -> None:
    assert git(project, "rev-list", "--all", "--count") == "1\n"
    assert git(project, "branch", "--show-current") == "main\n"
    assert git(project, "log", "--format=%s") == f"Start from {NAME}\n"
    assert git(project, "status", "--porcelain", "--ignored") == ""
    assert git(project, "fsck", "--strict") == ""


def test_make_setup_runs_it_before_it_installs_the_project(project: Path) -> None:
    makefile = (project / "Makefile").read_text(encoding="utf-8")
    (setup,) = re.findall(r"^setup:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert setup.index("bash requirements/repository.sh") < setup.index("--editable .")


def test_it_makes_it_once(folder: Path) -> None:
    assert_committed(folder, run(folder))
    (folder / "later.txt").touch()
    done = run(folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert git(folder, "status", "--porcelain") == "?? later.txt\n"


@pytest.mark.parametrize("template", ["/home/me/it's & \\1", "https://example.org/x.git"])
def test_a_template_that_others_cannot_reach_is_said(folder: Path, template: str) -> None:
    stored = json.dumps({"template": template, "commit": "0"}, indent=2)
    (folder / ".cruft.json").write_text(stored, encoding="utf-8")
    note = (
        f"note: in .cruft.json, replace {json.dumps(template)[1:-1]} by the URL of the template's "
        "repository, so that others can update\n"
    )
    for out in (MADE, ""):
        done = run(folder)
        assert (done.returncode, done.stdout) == (0, out)
        assert done.stderr == ("" if template.startswith("https:") else note)


def author(folder: Path) -> str:
    return git(folder, "log", "--format=%an <%ae>").strip()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", f"{NAME} <{NAME}@localhost>"),
        ("[user]\nname = O'Brien\nemail = ob@example.ie\n", "O'Brien <ob@example.ie>"),
        ("[user]\nname = O'Brien\n", f"O'Brien <{NAME}@localhost>"),
        ("[user]\nname =\nemail = ob@example.ie\n", f"{NAME} <ob@example.ie>"),
        ("[user]\nname = .\nemail = ob@example.ie\n", f"{NAME} <ob@example.ie>"),
        ("[user]\nname = O'Brien\nemail =\n", f"O'Brien <{NAME}@localhost>"),
        ("[user]\nuseConfigOnly = true\n", f"{NAME} <{NAME}@localhost>"),
    ],
    ids=repr,
)
def test_the_author_is_whom_git_knows(folder: Path, settings: str, expected: str) -> None:
    assert_committed(folder, run_with(folder, settings))
    assert author(folder) == expected


def test_empty_names_in_the_environment_count_as_none(folder: Path) -> None:
    done = run(folder, GIT_AUTHOR_NAME="", GIT_COMMITTER_NAME="", GIT_AUTHOR_EMAIL="")
    assert_committed(folder, done)
    assert author(folder) == f"{NAME} <{NAME}@localhost>"


@pytest.mark.parametrize(
    "settings",
    [
        "[core]\nattributesFile = ATTRIBUTES\n",
        "[core]\nattributesFile = ATTRIBUTES\n[filter \"canary\"]\nclean = touch 'CANARY'; cat\n",
        "[core]\nautocrlf = true\n",
        "[core]\nautocrlf = input\nsafecrlf = true\n",
        "[core]\nexcludesFile = EXCLUDES\n",
        "[core]\nfsmonitor = touch 'CANARY'\n",
        "[core]\nfileMode = false\neol = crlf\nquotePath = true\n",
        "[commit]\ngpgSign = true\ntemplate = EXCLUDES\ncleanup = scissors\nverbose = true\n",
        "[gpg]\nprogram = /bin/false\n[commit]\ngpgSign = true\n",
        "[init]\ndefaultBranch = trunk\n",
    ],
    ids=repr,
)
def test_no_setting_changes_the_commit(folder: Path, settings: str) -> None:
    attributes, excludes = folder.parent / "attributes", folder.parent / "excludes"
    attributes.write_text("*.txt text eol=lf ident filter=canary\n", encoding="utf-8")
    excludes.write_text("*.txt\n", encoding="utf-8")
    for name, path in (
        ("ATTRIBUTES", attributes),
        ("EXCLUDES", excludes),
        ("CANARY", folder.parent / "canary"),
    ):
        settings = settings.replace(name, str(path))
    assert_committed(folder, run_with(folder, settings))
    assert git(folder, "branch", "--show-current") == "main\n"
    modes = {line.split()[0] for line in git(folder, "ls-files", "--stage").splitlines()}
    assert modes == {"100644", "100755"}


def test_it_copies_nothing_from_git_s_template_folder(folder: Path) -> None:
    template = folder.parent / "git-template"
    (template / "hooks").mkdir(parents=True)
    (template / "info").mkdir()
    (template / "info" / "exclude").write_text("*.txt\n", encoding="utf-8")
    hook = template / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    hook.chmod(0o755)
    assert_committed(folder, run_with(folder, f"[init]\ntemplateDir = {template}\n"))
    assert not (folder / ".git" / "hooks").exists()
    assert not (folder / ".git" / "info" / "exclude").exists()


def test_it_runs_no_hook_of_the_user_s(folder: Path) -> None:
    hooks = folder.parent / "hooks"
    hooks.mkdir()
    hook = hooks / "pre-commit"
    hook.write_text(f"#!/bin/sh\ntouch '{folder.parent}/canary'\nexit 1\n", encoding="utf-8")
    hook.chmod(0o755)
    assert_committed(folder, run_with(folder, f"[core]\nhooksPath = {hooks}\n"))


def test_it_leaves_a_repository_named_by_the_environment_alone(folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    before = sorted((other / ".git").rglob("*"))
    done = run(
        folder,
        GIT_DIR=str(other / ".git"),
        GIT_WORK_TREE=str(other),
        GIT_INDEX_FILE=str(other / ".git" / "index"),
    )
    assert_committed(folder, done)
    assert sorted((other / ".git").rglob("*")) == before


def test_it_makes_none_inside_another_repository(folder: Path) -> None:
    git(folder.parent, "init", "--quiet")
    done = run(folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        f"note: this folder is inside the git repository {folder.parent}, "
        "so it gets none of its own\n"
    )
    assert not (folder / ".git").exists()


def test_it_makes_one_where_the_repository_around_ignores_the_folder(folder: Path) -> None:
    git(folder.parent, "init", "--quiet")
    (folder.parent / ".gitignore").write_text("/it's*\n", encoding="utf-8")
    assert_committed(folder, run(folder))


def test_it_says_in_one_line_that_git_is_missing(folder: Path) -> None:
    tools = folder.parent / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    done = run(folder, PATH=str(tools))
    assert (done.returncode, done.stdout) == (0, "")
    line = "note: git is not installed, so this folder is not a git repository yet\n"
    assert done.stderr == line
    assert not (folder / ".git").exists()


def test_it_says_in_one_line_that_git_failed_and_leaves_nothing(folder: Path) -> None:
    tools = folder.parent / "tools"
    tools.mkdir()
    broken = tools / "git"
    real = shutil.which("git")
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *" commit "*) echo first; echo "disk full" >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n',
        encoding="utf-8",
    )
    broken.chmod(0o755)
    done = run(folder, PATH=f"{tools}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "note: git could not make a first commit: disk full\n"
    assert not (folder / ".git").exists()
    assert make_repository(folder) == MADE


@pytest.mark.parametrize("end", ["true", "input"])
def test_a_clone_has_the_same_bytes_however_git_ends_lines(
    project: Path, tmp_path: Path, end: str
) -> None:
    """CRLF at the ends of their lines breaks every script."""
    shutil.copytree(project, tmp_path / "project")
    make_repository(tmp_path / "project")
    git(tmp_path, "-c", f"core.autocrlf={end}", "clone", "--quiet", "project", "clone")
    names = git(tmp_path / "project", "ls-files", "-z").split("\0")[:-1]
    assert "slurm/train.sh" in names
    left, right = tmp_path / "project", tmp_path / "clone"
    changed = [name for name in names if (left / name).read_bytes() != (right / name).read_bytes()]
    assert changed == []
