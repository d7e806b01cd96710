"""The tests of a downloaded archive of the template, which is no git repository."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from history import clone_with_working_tree
from rendering import ran

NO_HISTORY = "this is no git repository: there are no earlier commits to update from"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = clone_with_working_tree(tmp_path_factory.mktemp("archive"))
    shutil.rmtree(folder / ".git")
    return folder


def run(archive: Path, *arguments: str, ci: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = ran(command, cwd=archive, env=os.environ | {"CI": ci})
    assert done.returncode == bool(ci), done.stdout
    return done.stdout


def test_what_needs_the_history_is_skipped_and_all_else_passes(archive: Path) -> None:
    using = [
        file.name
        for file in sorted((archive / "tests").glob("test_*.py"))
        if file.name != Path(__file__).name
        and re.search(
            r"import.*\bROOT\b[^#]*\bgit\b|from history import (?!missing\n)",
            file.read_text("utf-8"),
        )
    ]
    assert {"test_prompts.py", "test_update.py"} <= set(using)
    said = run(
        archive, "-m", "not trains and not docs", *(f"tests/{name}" for name in using), ci=""
    )
    assert set(re.findall(r"^SKIPPED .*?: (.*)$", said, re.MULTILINE)) == {NO_HISTORY}


def test_in_ci_a_missing_history_is_a_failure(archive: Path) -> None:
    said = run(archive, "tests/test_update.py", "-k", "first_commit", ci="true")
    assert f"Failed: {NO_HISTORY}" in said
