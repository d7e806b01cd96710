"""The hook removes what was left out and prints the next steps, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rendering import NEXT_STEPS, ROOT, TEMPLATE, ran, template_files, tree

from local_extensions import COMPONENTS, ENGINES, EXAMPLES, PLACES

HOOK = ROOT / "hooks" / "post_gen_project.py"
TEMPLATE_NAME = "cookiecutter-distributed-torch"
FILES = {"file.txt", "pyproject.toml"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "it's rendered"
    folder.mkdir()
    (folder / "file.txt").write_text("text\n", encoding="utf-8")
    settings = f"[tool.{TEMPLATE_NAME}]\ncomponents = {json.dumps(list(COMPONENTS))}\n"
    settings += f"optional_examples = {json.dumps(list(EXAMPLES))}\n"
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    return folder


def run_hook(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, str(HOOK)], cwd=folder, env=dict(os.environ) | environment)


def test_it_prints_the_next_steps_and_writes_nothing(folder: Path) -> None:
    done = run_hook(folder)
    quoted = str(folder).replace("'", "'\"'\"'")
    assert (done.returncode, done.stdout, done.stderr) == (0, NEXT_STEPS % f"'{quoted}'", "")
    assert tree(folder) == FILES


def test_it_prints_nothing_where_cruft_compares_renders(folder: Path) -> None:
    done = run_hook(folder, DISTRIBUTED_TORCH_QUIET="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_neither_an_odd_locale_nor_a_closed_pipe_fails_it(folder: Path) -> None:
    """Cookiecutter removes a project whose hook has failed."""
    folder = folder.rename(folder.with_name("größe"))
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
    assert tree(folder) == FILES | {".github", ".github/CODEOWNERS"}
    (folder / ".github" / "CODEOWNERS").unlink()
    (folder / ".github" / "workflows").mkdir()
    assert run_hook(folder).returncode == 0
    assert tree(folder) == FILES


def test_it_removes_the_components_that_pyproject_does_not_list(folder: Path) -> None:
    def lay() -> None:
        for engine in COMPONENTS:
            for file in (
                f"requirements/{engine}.txt",
                f"src/mine_trainer/strategies/{engine}/inner/strategy.py",
                f"tests/test_{engine}_more.py",
                f"tests/{engine}_subject.py",
                f"tests/conformance/{engine}_rows.py",
                f"src/mine/tasks/{engine}.py",  # the user's, where a project is rendered over
                f"{engine}.md",
            ):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).touch()

    lay()
    before = tree(folder)
    assert run_hook(folder).returncode == 0
    assert tree(folder) == before
    settings = folder / "pyproject.toml"
    settings.write_text(
        settings.read_text().replace(json.dumps(list(COMPONENTS)), '["fairscale", "xla", "legacy"]')
    )
    assert run_hook(folder).returncode == 0
    gone = ("deepspeed", "horovod", "model_parallel", "asynchronous", "tools")
    stays = ("src/mine/tasks/", *(f"{component}.md" for component in gone))
    assert before - tree(folder) == {
        path
        for path in before
        if any(component in path for component in gone) and not path.startswith(stays)
    }


def test_it_removes_pages_that_were_rendered_empty(folder: Path) -> None:
    empty = {"docs/plan.md", "docs/strategies/family/one.md", "docs/strategies/family/two.md"}
    kept = {"docs/index.md", "docs/strategies/index.md", "README.md", "a.md"}
    for file in (*empty, *kept):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("" if file in empty | {"a.md"} else "# Page\n")
    before = tree(folder)
    assert run_hook(folder).returncode == 0
    assert before - tree(folder) == empty | {"docs/strategies/family"}


def test_it_removes_the_files_of_places_that_were_left_out(folder: Path) -> None:
    files = {"kubernetes/jobset.yaml", "kubernetes/setup.yaml", "kubernetes/trainjob.yaml"}
    files |= {"ssh/host.sh", "ssh/train.sh"}
    assert files == {
        f"{place}/{file}" for place in PLACES for file in template_files(TEMPLATE / place)
    }
    for file in (*files, "kubernetes/mine.yaml"):  # the user's
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    before, settings = tree(folder), folder / "pyproject.toml"
    assert run_hook(folder).returncode == 0
    assert tree(folder) == before
    settings.write_text(settings.read_text() + "places = []\n")
    assert run_hook(folder).returncode == 0
    assert before - tree(folder) == files | {"ssh"}


def test_the_hook_s_patterns_name_all_files_of_an_engine() -> None:
    """So that a file which bears an engine's name goes with it, wherever it stands."""
    strategies = "src/{{cookiecutter.package_name}}_trainer/strategies"
    for engine in ENGINES:
        matches = {
            path
            for pattern in re.findall(r'^    "(\S+%s\S*)",$', HOOK.read_text(), re.MULTILINE)
            for path in TEMPLATE.glob(pattern % engine)
        }
        assert TEMPLATE / strategies / engine in matches
        named = {path for path in TEMPLATE.rglob(f"*{engine}*") if "__pycache__" not in path.parts}
        named = {path for path in named if path.suffix != ".md"}  # which are rendered empty
        assert {path for path in named if not matches & {*path.parents}} == matches


def test_it_holds_no_jinja() -> None:
    text = HOOK.read_text(encoding="utf-8")
    assert not any(mark in text for mark in ("{{", "{%", "{#"))
