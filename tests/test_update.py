"""`cruft update` brings a project of any earlier commit up to date, with its owner's edits kept."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.main import cookiecutter
from history import clone_with_working_tree, commit, earlier_commits, missing
from rendering import CORE, DEFAULTS, ROOT, git, make_repository, ran, tree
from terminal import Terminal
from test_prompts import PROMPTS

QUESTION = "favorite_color"
# A default that has changed since stays as it was in the project: so the description is given too.
GIVEN = {
    "author_name": "Zoë O'Brien",
    "description": "Trains.",
    "license": "BSD-3-Clause",
    "version": "0.3.0",
}
PYTHON = Path(os.environ.get("PROJECT_PYTHON", ROOT / "build" / "venv" / "bin" / "python"))


def cruft(*arguments: str, cwd: Path) -> str:
    """Run cruft and return what it prints; all that it prints in trouble goes to stderr."""
    done = ran([sys.executable, "-m", "cruft", *arguments], cwd=cwd)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of the template whose newest commit asks one question more than this tree."""
    earlier_commits()  # or skip
    clone = clone_with_working_tree(tmp_path_factory.mktemp("template"))
    settings = clone / "cookiecutter.json"
    check = f"{{{{ cookiecutter.{QUESTION} | checked('{QUESTION}') }}}}"
    entry = f'"{QUESTION}": "green",\n  "__checked_{QUESTION}": "{check}",\n  '
    replace(settings, '"__year"', entry + '"__year"')
    replace(settings, '"__prompts__": {', f'"__prompts__": {{"{QUESTION}": "Favorite color",')
    replace(
        clone / "local_extensions.py",
        '    "project_name": Rule(',
        f'    "{QUESTION}": one_of("red", "green"),\n    "project_name": Rule(',
    )
    gitignore = clone / "{{cookiecutter.project_slug}}" / ".gitignore"
    with gitignore.open("a", encoding="utf-8") as file:
        file.write(f"# {{{{ cookiecutter.{QUESTION} }}}}\n")
    commit(clone, "Ask one question more")
    return clone


def start(template: Path, folder: Path, commit: str, **more: str) -> Path:
    """Start a project at a commit of the template, as its user does, with more answers."""
    options = ("--extra-context", json.dumps(GIVEN | more), "--no-input")
    cruft("create", str(template), "--checkout", commit, *options, cwd=folder)
    project = folder / "my-project"
    if (project / "requirements" / "repository.sh").exists():
        make_repository(project)  # `make setup`; earlier hooks did it, without .cruft.json
    return project


def edit(project: Path) -> None:
    """Add, change and remove files of a project, as its owner does, and commit that."""
    (project / "src" / "my_project" / "tasks").mkdir(parents=True, exist_ok=True)
    (project / "src" / "my_project" / "tasks" / "mine.py").write_bytes(b"ANSWER = 42\n")
    replace(project / "pyproject.toml", '\nversion = "0.3.0"\n', '\nversion = "7.0"\n')
    # Where no version of the template has changed the file: git merges no lines that touch.
    replace(project / ".gitignore", ".hypothesis/\n", ".hypothesis/\n/private/\n")
    (project / "setup.py").unlink()
    commit(project, "Edit it")


@pytest.fixture(scope="session")
def expected(template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return all files of a new project with the same answers and the same edits."""
    return files_of_new(template, tmp_path_factory.mktemp("new"))


def files_of_new(template: Path, output: Path, **more: str) -> dict[str, bytes]:
    """Return all files of a new project with the same edits, and with more answers."""
    new = Path(
        cookiecutter(
            str(template),
            no_input=True,
            extra_context=GIVEN | more,
            output_dir=str(output),
            accept_hooks=True,
        )
    )
    make_repository(new)
    edit(new)
    return files(new)


def files(project: Path) -> dict[str, bytes]:
    names = [name for name in tree(project) if (project / name).is_file()]
    kept = [name for name in names if not name.startswith(".git/") and name != ".cruft.json"]
    return {name: (project / name).read_bytes() for name in kept}


def answers(project: Path) -> dict[str, Any]:
    stored = json.loads((project / ".cruft.json").read_text(encoding="utf-8"))
    context: dict[str, Any] = stored["context"]["cookiecutter"]
    return {name: value for name, value in context.items() if not name.startswith("_")}


def in_history(quarter: int) -> str:
    """Return the commit that is so many quarters of the history after its begin."""
    commits = earlier_commits()
    return commits[quarter * (len(commits) - 1) // 4]


def update(template: Path, folder: Path, commit: str) -> Path:
    """Start a project at a commit of the template, edit it and update it."""
    project = start(template, folder, commit)
    edit(project)
    assert "Project's cruft has been updated" in cruft("update", "--skip-apply-ask", cwd=project)
    return project


@pytest.mark.parametrize("quarter", [0, 2, None], ids=str)
def test_an_update_keeps_edits_and_brings_the_rest(
    template: Path, expected: dict[str, bytes], tmp_path: Path, quarter: int | None
) -> None:
    """From the first commit, from one in the middle, and (None) from the working tree."""
    project = update(template, tmp_path, "HEAD~1" if quarter is None else in_history(quarter))
    there = files(project)
    assert there.keys() == expected.keys()
    assert [name for name in there if there[name] != expected[name]] == []
    assert answers(project) == DEFAULTS | GIVEN | {QUESTION: "green"}
    assert b"# green\n" in there[".gitignore"]
    assert git(project, "ls-files", "--unmerged") == ""
    # What is up to date stays as it is, and has nothing that cruft would show.
    commit(project, "Update it")
    assert "Nothing to do" in cruft("update", "--skip-apply-ask", cwd=project)
    assert git(project, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("begin", "switch"),
    [
        (None, {"deepspeed": "no", "horovod": "no"}),  # from before there were these questions
        ({"fairscale": "no", "horovod": "no"}, {"deepspeed": "no", "horovod": "yes"}),
        ({}, CORE),
        (CORE, dict.fromkeys(CORE, "yes") | {"parts": "all"}),
        (CORE, {"parts": "all", "tools": "yes"}),  # what is stored of other parts stays
    ],
    ids=["before the questions", "one for another", "core", "all", "more pages"],
)
def test_an_update_leaves_out_and_brings_engines(
    template: Path, tmp_path: Path, begin: dict[str, str] | None, switch: dict[str, str]
) -> None:
    (tmp_path / "old").mkdir()
    old = in_history(0) if begin is None else "HEAD"
    project = start(template, tmp_path / "old", old, **(begin or {}))
    edit(project)
    switching = ("--variables-to-update", json.dumps(switch))
    said = cruft("update", "--skip-apply-ask", *switching, cwd=project)
    assert "Project's cruft has been updated" in said
    there = files(project)
    expected = files_of_new(template, tmp_path / "new", **((begin or {}) | switch))
    assert there.keys() == expected.keys()
    assert [name for name in there if there[name] != expected[name]] == []
    assert answers(project) == DEFAULTS | GIVEN | (begin or {}) | switch | {QUESTION: "green"}
    assert git(project, "ls-files", "--unmerged") == ""


def test_an_added_question_is_asked_where_cruft_is_to_ask(template: Path, tmp_path: Path) -> None:
    project = start(template, tmp_path, in_history(0))
    commit(project, "Start it")
    asking = ("cruft", "update", "--skip-apply-ask", "--cookiecutter-input")
    with Terminal(sys.executable, "-m", *asking, cwd=project) as terminal:
        for name, prompt in PROMPTS.items():
            terminal.answer(f"] {prompt.splitlines()[0][:50]}", "")
            assert name in DEFAULTS
        question = f"/{len(PROMPTS) + 1}] Favorite color"
        terminal.answer(question, "blue")
        said = terminal.answer(question, "red")
        code, _ = terminal.end()
    assert said.split("\n")[1] == "favorite_color 'blue' is refused: choose from red, green"
    assert code == 0
    assert answers(project) == DEFAULTS | GIVEN | {QUESTION: "red"}


def test_cruft_s_file_is_in_the_first_commit(template: Path, tmp_path: Path) -> None:
    project = start(template, tmp_path, "HEAD")
    assert git(project, "rev-list", "--all", "--count") == "1\n"
    assert ".cruft.json" in git(project, "ls-files").splitlines()
    assert git(project, "status", "--porcelain", "--ignored") == ""
    assert cruft("check", cwd=project).startswith("SUCCESS")
    assert cruft("diff", "--exit-code", cwd=project) == ""


def test_a_repository_beside_the_template_is_left_alone(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed of an older render lies where cruft puts it, in a temporary folder."""
    from cruft import create

    clone = tmp_path / "a" / "b" / "repo"
    clone.parent.mkdir(parents=True)
    git(tmp_path, "clone", "--quiet", str(template), str(clone))
    other = clone.with_name("current_template")
    git(tmp_path, "init", "--quiet", str(other))
    monkeypatch.delenv("DISTRIBUTED_TORCH_QUIET", raising=False)
    create(str(template), output_dir=tmp_path / "by-cruft")  # so that it is imported
    cookiecutter(str(clone), no_input=True, output_dir=str(tmp_path / "out"))
    assert (other / ".git").is_dir()
    assert "DISTRIBUTED_TORCH_QUIET" not in os.environ


@pytest.mark.trains
def test_an_updated_project_trains(template: Path, tmp_path: Path) -> None:
    if not PYTHON.exists():
        missing(f"there is no {PYTHON} (PROJECT_PYTHON): make demo")
    project = update(template, tmp_path, in_history(0))
    fit = ("-m", "my_project", "fit", "--config", "configs/digits.yaml")
    options = ["--trainer.max_epochs", "1", "--trainer.run_name", "updated"]
    done = ran([PYTHON, *fit, *options], cwd=project, env=os.environ | {"PYTHONPATH": "src"})
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((project / "runs" / "updated" / "run.json").read_text(encoding="utf-8"))
    state = record["attempts"][-1]["git"]
    # The update is not committed yet.
    assert (state["commit"], state["dirty"]) == (git(project, "rev-parse", "HEAD").strip(), True)
    assert state["diff"].startswith("diff --git a/")
    metrics = (project / "runs" / "updated" / "metrics.csv").read_text(encoding="utf-8")
    assert "val_accuracy" in metrics
