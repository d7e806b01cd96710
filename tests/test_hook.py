"""The hook removes empty conditional folders and prints the next steps, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rendering import NEXT_STEPS, ROOT, tree

HOOK = ROOT / "hooks" / "post_gen_project.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "it's rendered"
    folder.mkdir()
    (folder / "file.txt").write_text("text\n", encoding="utf-8")
    return folder


def run_hook(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HOOK)],
        cwd=folder,
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_it_prints_the_next_steps_and_writes_nothing(folder: Path) -> None:
    done = run_hook(folder)
    quoted = str(folder).replace("'", "'\"'\"'")
    assert (done.returncode, done.stdout, done.stderr) == (0, NEXT_STEPS % f"'{quoted}'", "")
    assert tree(folder) == {"file.txt"}


def test_it_prints_nothing_where_cruft_compares_renders(folder: Path) -> None:
    done = run_hook(folder, DISTRIBUTED_TORCH_QUIET="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_neither_an_odd_locale_nor_a_closed_pipe_fails_it(tmp_path: Path) -> None:
    """Cookiecutter removes a project whose hook has failed."""
    folder = tmp_path / "größe"
    folder.mkdir()
    done = run_hook(folder, LC_ALL="C", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"cd '{folder}'\n" in done.stdout
    read, write = os.pipe()
    os.close(read)
    closed = subprocess.run([sys.executable, str(HOOK)], cwd=folder, stdout=write, timeout=600)
    os.close(write)
    assert closed.returncode == 0


def test_it_removes_a_conditional_folder_only_where_it_is_empty(folder: Path) -> None:
    (folder / ".github" / "workflows").mkdir(parents=True)
    (folder / ".github" / "CODEOWNERS").touch()
    assert run_hook(folder).returncode == 0
    assert tree(folder) == {".github", ".github/CODEOWNERS", "file.txt"}
    (folder / ".github" / "CODEOWNERS").unlink()
    (folder / ".github" / "workflows").mkdir()
    assert run_hook(folder).returncode == 0
    assert tree(folder) == {"file.txt"}


def test_it_holds_no_jinja() -> None:
    text = HOOK.read_text(encoding="utf-8")
    assert not any(mark in text for mark in ("{{", "{%", "{#"))
