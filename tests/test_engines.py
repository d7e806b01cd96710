"""Each engine or family is a question: a project without it holds no file about it."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from history import missing
from linters import lint_all, lint_python
from rendering import DEFAULTS, braces_left, check_works, expected_files, ran, render, tree
from renders_table import choices, kept, name_of, size
from test_update import PYTHON

from local_extensions import APART, COMPONENTS, ENGINES, FAMILIES

CHOICES = list(choices())
# What the README and the pages say of the families, and of commands about a run.
NAMES = {
    "model_parallel": "sequential|tensor_parallel|mesh",
    "asynchronous": "parameter_server",
    "legacy": r"Lightning 1\.x",
    "tools": r"my_project (?:plan|report|reproduce)|doctor|report\.html|report-light",
}
# Whose folders are not in `strategies/`.
ABOVE = ("legacy", "tools")
Renders = dict[str, Path]
# In one process, which makes the renders once.
pytestmark = pytest.mark.xdist_group("engines")
PYTEST = ("pytest", "-p", "no:cacheprovider")


@pytest.fixture(scope="session")
def renders(tmp_path_factory: pytest.TempPathFactory) -> Renders:
    folder = tmp_path_factory.mktemp("engines")
    return {name_of(a): render(folder / name_of(a), a, hooks=True) for a in CHOICES}


@pytest.fixture(params=CHOICES, ids=name_of)
def answers(request: pytest.FixtureRequest) -> dict[str, str]:
    answers: dict[str, str] = request.param
    return answers


@pytest.fixture
def rendered(renders: Renders, answers: dict[str, str]) -> Path:
    return renders[name_of(answers)]


def files(project: Path) -> list[str]:
    return sorted(path for path in tree(project) if (project / path).is_file())


def test_it_holds_the_files_of_the_parts_that_it_includes(
    rendered: Path, answers: dict[str, str]
) -> None:
    check_works(rendered, DEFAULTS | answers)
    assert braces_left(rendered, expected_files(DEFAULTS | answers)) == []
    assert not [path for path in rendered.rglob("*") if path.is_dir() and not any(path.iterdir())]


def test_it_names_no_engine_that_it_leaves_out(rendered: Path, answers: dict[str, str]) -> None:
    left_out = [engine for engine in ENGINES if answers[engine] == "no"]
    pattern = re.compile("|".join(left_out) or "(?!)", re.IGNORECASE)
    named = [
        f"{file}:{number}: {line}"
        for file in files(rendered)
        if not file.endswith(".webp")
        if "_trainer/legacy/" not in file  # older names of all engines, which it refuses in a line
        for number, line in enumerate((rendered / file).read_text("utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert named == []
    readme = (rendered / "README.md").read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in rendered.glob("docs/**/*.md")]
    for family in FAMILIES:
        # Pages compare with Lightning, where its older names are left out too.
        text = readme if family == "legacy" else "".join([readme, *pages])
        assert bool(re.search(rf"\b({NAMES[family]})\b", text)) == (answers[family] == "yes")


def test_the_project_says_which_parts_it_includes(rendered: Path, answers: dict[str, str]) -> None:
    settings = tomllib.loads((rendered / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["cookiecutter-distributed-torch"]["components"] == kept(answers)
    extras = set(settings["project"]["optional-dependencies"])
    # make builds Horovod; pip cannot install what needs another torch beside this one.
    assert extras & set(COMPONENTS) == set(kept(answers)) - {"horovod", *APART, *FAMILIES}


def test_make_lists_its_engines_and_no_others(rendered: Path, answers: dict[str, str]) -> None:
    done = ran(["make"], cwd=rendered, check=True)
    listed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")]
    engines = [component for component in kept(answers) if component in ENGINES]
    assert sorted(set(listed) & set(COMPONENTS)) == engines
    assert ("ENGINES=" in done.stdout) == bool(set(engines) - set(APART))
    dry = ran(["make", "-n", *listed], cwd=rendered)
    assert dry.returncode == 0, dry.stderr


def test_its_files_are_clean(rendered: Path) -> None:
    assert lint_python(rendered) == ""
    assert lint_all(rendered) == ""


def test_a_job_without_horovod_is_launched_as_tasks(
    rendered: Path, answers: dict[str, str]
) -> None:
    script = 'source slurm/settings.sh && echo "$LAUNCH"'
    for value, launch in (("", "" if answers["horovod"] == "yes" else "tasks"), ("a", "a")):
        done = ran(
            ["bash", "-euc", script], cwd=rendered, env=os.environ | {"LAUNCH": value}, check=True
        )
        assert done.stdout == f"{launch}\n"


def test_the_trainer_is_smaller_by_the_folders_of_its_parts(renders: Renders) -> None:
    trainer = {name: project / "src/my_project_trainer" for name, project in renders.items()}
    full = trainer[name_of(CHOICES[0])]
    folders = [
        full / ("" if component in ABOVE else "strategies") / component for component in COMPONENTS
    ]
    components = sum(size(folder).lines for folder in folders)
    assert components > 4000
    assert size(full).lines - size(trainer["none"]).lines == components
    assert size(trainer["core"]) == size(trainer["none"])


def in_project(project: Path, *command: str) -> str:
    """Run a module by the project's Python, which has every engine installed; return its output."""
    if not PYTHON.exists():
        missing(f"there is no {PYTHON} (PROJECT_PYTHON): make demo")
    variables = {"PYTHONPATH": "src", "MYPYPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"}
    done = ran([PYTHON, "-m", *command], cwd=project, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.trains
def test_its_types_are_right_and_its_tests_can_be_collected(
    rendered: Path, answers: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # In one place, one after another: mypy's cache keeps what is the same in all.
    place = tmp_path_factory.getbasetemp() / "types"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(rendered, place)
    in_project(place, "mypy", "--strict", "--cache-dir", str(place.with_name("mypy")))
    collected = in_project(rendered, *PYTEST, "--collect-only", "-q")
    rows = {engine for engine in ENGINES if f"::test_equals_one_process[{engine}-" in collected}
    assert rows == {"deepspeed", "horovod"} & set(kept(answers))
    assert ("[ddp_sharded-" in collected) == ("fairscale" in kept(answers))


@pytest.mark.trains
def test_a_part_is_removed_by_deleting_its_folder(renders: Renders, tmp_path: Path) -> None:
    """What was imported leaves a folder without sources behind, which is no engine."""
    project = tmp_path / "my-project"
    shutil.copytree(renders[name_of(CHOICES[0])], project)
    strategies = project / "src" / "my_project_trainer" / "strategies"
    for component in (*ENGINES, "model_parallel", "asynchronous"):
        shutil.rmtree(strategies / component)
        (strategies / component / "__pycache__").mkdir(parents=True)
    said = in_project(
        project, *PYTEST, "-q", "tests/conformance", "-k", "row or single_device-0-sgd"
    )
    assert re.search(r"\b3 passed\b", said), said
    collected = in_project(project, *PYTEST, "--collect-only", "-q")
    assert not re.search("deepspeed_stage|tensor_parallel|parameter_server", collected)
