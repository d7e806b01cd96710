"""No answer reaches a place where a shell, make, Docker or a CI service would run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import CANARY, HOSTILE
from linters import lint_all, scripts
from rendering import DEFAULTS, check_works, ran, render, tree

TEXTS = ("project_name", "description", "author_name")
TRIED = (
    *("double quote", "triple quotes", "command substitution", "backticks", "semicolon"),
    *("variable", "backslashes", "YAML"),
)
# The only files for text that people write; pyproject.toml has it as strings of TOML, which
# are strings of YAML in mkdocs.yml.
FOR_PEOPLE = {"README.md", "LICENSE", "pyproject.toml", "mkdocs.yml"}
# In each answer, so that it is found whatever was quoted around it.
MARK = "m4rk"


def files(folder: Path) -> set[str]:
    return {name for name in tree(folder) if (folder / name).is_file()}


def with_code(folder: Path, code: str, service: str) -> Path:
    """Return a render with that code in every text, and its names as ever."""
    answers = DEFAULTS | dict.fromkeys(TEXTS, f"{HOSTILE[code]} {MARK}") | {"ci": service}
    answers |= {"other_launchers": "all"}
    project = render(folder, answers)
    check_works(project, answers)
    return project


def run(project: Path, *arguments: str) -> None:
    """Run that in a render, and assert that it says nothing of errors."""
    done = ran(arguments, cwd=project)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("code", "service"), [*((code, "github") for code in TRIED), ("command substitution", "gitlab")]
)
def test_text_is_in_no_file_that_is_run(tmp_path: Path, code: str, service: str) -> None:
    project = with_code(tmp_path, code, service)
    before = files(tmp_path)
    read = {
        name: (project / name).read_text(encoding="utf-8")
        for name in files(project)
        if not name.endswith(".webp")
    }
    assert {name for name, text in read.items() if MARK in text} == FOR_PEOPLE
    assert lint_all(project) == ""

    for script in scripts(project):
        run(project, "bash", "-n", str(script))
    run(project, "bash", "-euc", "source slurm/settings.sh")
    run(project, "make", "help")
    run(project, "make", "--dry-run", "lint", "test")
    assert files(tmp_path) == before


def test_the_code_would_run(tmp_path: Path) -> None:
    """Show that the test above can fail: where the text does reach a script, it runs."""
    project = with_code(tmp_path, "command substitution", "none")
    text = (project / "LICENSE").read_text(encoding="utf-8")
    (code,) = [line for line in text.splitlines() if MARK in line]
    (project / "script.sh").write_text(f'echo "{code}"\n', encoding="utf-8")
    run(project, "bash", "script.sh")
    assert (project / CANARY).exists()
