"""The examples of each answer: their files, their types, that they train, and that they can go."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from history import missing
from linters import lint_python
from rendering import (
    DEFAULTS,
    ROOT,
    braces_left,
    check_works,
    expected_files,
    ran,
    removed_by_hook,
    render,
    tree,
)
from test_update import PYTHON

from local_extensions import EXAMPLES, RULES, examples

# The packages of `make models`. torch's build for the CPU does not load torchvision's operators,
# whose names timm imports; the examples call none.
PACKAGES = ROOT / "build" / "model-packages"
OPERATORS = """import torch
LIBRARY = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    LIBRARY.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""


@pytest.fixture(params=RULES["examples"].choices, scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"examples": request.param}


@pytest.fixture(scope="module")
def rendered(answers: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(tmp_path_factory.mktemp("examples"), answers, hooks=True)


def delete_examples(project: Path) -> None:
    page = project / "docs" / "how-to" / "delete-examples.md"
    [lines] = re.findall(r"```\n(rm src/.*?)```", page.read_text("utf-8"), re.DOTALL)
    subprocess.run(["bash", "-e", "-c", lines], cwd=project, check=True)


def test_a_project_has_the_files_of_its_examples(rendered: Path, answers: dict[str, str]) -> None:
    check_works(rendered, DEFAULTS | answers)
    assert braces_left(rendered, expected_files(DEFAULTS | answers)) == []
    assert lint_python(rendered) == ""
    assert tree(rendered) & removed_by_hook(DEFAULTS | answers) == set()
    for example in EXAMPLES:
        belongs = example in examples(answers)
        assert (rendered / "src" / "my_project" / "tasks" / f"{example}.py").is_file() == belongs
        assert (rendered / "configs" / f"{example}.yaml").is_file() == belongs
    page = rendered / "docs" / "how-to" / "examples.md"
    assert page.is_file() == bool(examples(answers))
    if page.is_file():
        text = page.read_text("utf-8")
        shown = set(re.findall(r"configs/(\w+)\.yaml", text))
        assert (
            shown == set(re.findall(r"^make (\w+)", text, re.MULTILINE)) == set(examples(answers))
        )


def test_make_installs_the_packages_of_its_examples(
    rendered: Path, answers: dict[str, str]
) -> None:
    done = ran(["make"], cwd=rendered, check=True)
    listed = re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE)
    assert set(listed) & set(EXAMPLES) == set(examples(answers))
    for example in examples(answers):
        said = ran(["make", "-n", example], cwd=rendered, check=True).stdout
        assert ("PACKAGE=timm" if example == "images" else f"requirements/{example}.txt") in said


def test_one_command_deletes_all_examples(rendered: Path, tmp_path: Path) -> None:
    project = tmp_path / "my-project"
    shutil.copytree(rendered, project)
    delete_examples(project)
    left = tree(project)
    assert [name for name in left if name.startswith("configs/")] == []
    tasks = "src/my_project/tasks/"
    assert [name for name in left if name.startswith(tasks)] == [f"{tasks}__init__.py"]
    assert not {f"requirements/{example}.txt" for example in EXAMPLES} & left
    assert "tests/test_examples.py" not in left
    assert lint_python(project) == ""


@pytest.mark.parametrize("places", [{}, {"editor": "vscode", "other_launchers": "all"}])
def test_the_page_names_each_file_that_names_a_deleted_one(
    tmp_path: Path, answers: dict[str, str], places: dict[str, str]
) -> None:
    project = render(tmp_path, answers | places, hooks=True)
    before = tree(project)
    delete_examples(project)
    left = tree(project)
    deleted = before - left
    deleted |= {
        name.removeprefix("src/").removesuffix(".py").replace("/", ".")
        for name in deleted
        if name.startswith("src/")
    }
    a_deleted_one = re.compile(rf"(?<![\w/.-])({'|'.join(map(re.escape, deleted))})(?!\w)")
    naming = {
        name
        for name in left
        if (project / name).is_file()
        and a_deleted_one.search((project / name).read_text("utf-8", errors="replace"))
    }
    page = (project / "docs" / "how-to" / "delete-examples.md").read_text("utf-8")
    said = set(re.findall(r"`([\w./-]+)`", page.split("```")[2])) & left
    elsewhere = {name for name in naming if not name.startswith("docs/")}
    assert elsewhere == said - {"mkdocs.yml", "docs/how-to/examples.md"}
    assert "`docs/`" in page
    for name in elsewhere - {"README.md"}:  # rows of the table, and others: comments only
        lines = (project / name).read_text("utf-8").splitlines()
        names_one = [line for line in lines if a_deleted_one.search(line)]
        assert f"| `{name}`" in page or f", `{name}` |" in page or all("#" in n for n in names_one)


def in_project(project: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a module by the project's Python."""
    if not PYTHON.exists():
        missing(f"there is no {PYTHON} (PROJECT_PYTHON): make demo")
    source = str(project / "src")
    variables = {"PYTHONPATH": source, "MYPYPATH": source, "PYTHONDONTWRITEBYTECODE": "1"} | more
    return ran([PYTHON, "-m", *words], cwd=project, env=os.environ | variables, timeout=3000)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages that the examples need."""
    if not any(PACKAGES.glob(".ready-*")):
        missing("models are not installed: make models")
    folder = tmp_path_factory.mktemp("packages")
    for path in PACKAGES.iterdir():
        if path.name != "torchvision":
            (folder / path.name).symlink_to(path)
    vision = folder / "torchvision"
    vision.mkdir()
    for path in (PACKAGES / "torchvision").iterdir():
        if path.name == "__init__.py":
            (vision / path.name).write_text(OPERATORS + path.read_text("utf-8"), encoding="utf-8")
        elif path.name != "__pycache__":
            (vision / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(tmp_path_factory.mktemp("every"), {"examples": "all"}, hooks=True)


@pytest.mark.trains
def test_types_are_right_with_the_packages_and_without(
    every: Path, packages: Path, tmp_path: Path
) -> None:
    # Only what the examples import: on this path, errors in packages are told, too.
    for name in ("datasets", "peft", "timm", "torch_geometric", "transformers"):
        (tmp_path / name).symlink_to(packages / name)
    for more in ({}, {"MYPYPATH": f"{every / 'src'}:{tmp_path}"}):
        cache = str(every.with_name("mypy"))
        done = in_project(every, "mypy", "--strict", "--cache-dir", cache, **more)
        assert done.returncode == 0, done.stdout


@pytest.mark.trains
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_package_that_is_not_installed_is_a_line(every: Path, example: str) -> None:
    done = in_project(every, "my_project", "fit", "--config", f"configs/{example}.yaml")
    assert done.returncode == 2
    *_, line = done.stderr.splitlines()
    assert re.match(
        rf"error: data.class_path=.*: No module named '\w+.*'; run `make {example}`", line
    )
    assert "Traceback" not in done.stderr


@pytest.mark.trains
def test_they_train_and_resume(every: Path, packages: Path) -> None:
    paths = f"{every / 'src'}:{packages}"
    words = ("pytest", "-q", "-p", "no:cacheprovider", "tests/test_examples.py")
    done = in_project(every, *words, PYTHONPATH=paths, CI="true")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.trains
def test_the_rest_works_without_any_example(tmp_path: Path) -> None:
    project = render(tmp_path, {"examples": "all"}, hooks=True)
    delete_examples(project)
    pytest_of = ("pytest", "-q", "-p", "no:cacheprovider", "tests")
    row = (*pytest_of, "-k", "equals_one_process and ddp-0-sgd")
    for words in (("mypy",), (*pytest_of, "--collect-only"), row):
        done = in_project(project, *words)
        assert done.returncode == 0, done.stdout + done.stderr
