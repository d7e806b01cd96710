"""The pages say what the files say."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import conformance_tables
import names_table
import pytest
import structure_drawing
import structure_table
from linters import scripts
from options_table import PAGE, page
from rendering import DEFAULTS, ROOT, TEMPLATE, ran
from test_update import PYTHON

from local_extensions import PYTHON_MODULES, RESERVED, RULES

# But for MkDocs, whose environment does not have the project.
PROJECT_LOCKS = {
    lock.name: lock for lock in (TEMPLATE / "requirements").glob("*.txt") if lock.name != "docs.txt"
}


def test_the_table_of_options_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run `make tables`"
    assert "| `license` | License | `MIT` | `MIT` or `Apache-2.0` or" in text


def test_the_page_of_names_is_up_to_date() -> None:
    assert names_table.PAGE.read_text(encoding="utf-8") == names_table.page(), "run `make tables`"


def test_the_maps_of_the_trainer_are_up_to_date() -> None:
    for path, text in structure_table.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run `make tables`"
    assert "| `errors.py` |" in structure_table.short_map()
    assert "    run/ " in structure_table.tree()


def test_the_drawing_of_the_trainer_is_up_to_date() -> None:
    assert structure_drawing.FILE.read_text(encoding="utf-8") == structure_drawing.drawing(), (
        "run `make tables`"
    )
    assert structure_drawing.way() == ["data", "loop", "strategies", "module", "logging"]


def test_each_strategy_s_results_are_up_to_date() -> None:
    pages = conformance_tables.pages()
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run `make tables`"
    marked = [names for text in pages.values() for names in conformance_tables.MARKED.findall(text)]
    shown = {name for names in marked for name in names.split("; ")}
    # Variants may be left out, as those of few configurations are; a strategy may not.
    assert {name for name in conformance_tables.measured() if "," not in name} <= shown


def section(heading: str) -> str:
    """Return a section of a project's docs/design.md."""
    text = (TEMPLATE / "docs" / "design.md").read_text(encoding="utf-8")
    return re.split(r"\n##+ ", text.split(f"# {heading}\n")[1])[0]


def test_files_of_the_list_of_tasks_exist() -> None:
    for row in re.findall(r"^\| (?!task |---).*", section("Where to look"), re.MULTILINE):
        named = re.findall(r"`([\w/]+(?:\.py|/))`", row)
        files = {path for path in named if not path.startswith("tests/")}
        assert 1 <= len(files) <= 3, row
        for path in named:
            folder = TEMPLATE if path.startswith("tests/") else structure_table.TRAINER
            assert (folder / path).exists(), row


def test_the_path_of_a_batch_is_short() -> None:
    rows = re.findall(r"^\| `(.+\.py)` \| (\d+) \|", section("The path of a batch"), re.MULTILINE)
    lines = {path: (structure_table.TRAINER / path).read_bytes().count(b"\n") for path, _ in rows}
    assert sum(lines.values()) <= 2500
    written = {path: int(number) for path, number in rows}
    assert all(abs(written[path] - count) <= 30 for path, count in lines.items()), lines


def test_every_question_has_a_wording_and_is_checked_right_after_it() -> None:
    settings = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    questions = [key for key in settings if not key.startswith("_")]
    assert questions == list(RULES) == list(DEFAULTS) == list(settings["__prompts__"])
    keys = list(settings)
    for name in questions:
        check = keys[keys.index(name) + 1]
        assert check == f"__checked_{name}"
        assert settings[check] == f"{{{{ cookiecutter.{name} | checked('{name}') }}}}"


def pins(lock: Path) -> dict[str, str]:
    text = lock.read_text(encoding="utf-8")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def test_no_command_may_hide_one_that_scripts_call(project: Path) -> None:
    """What stands where a command does, and is one on this machine but not of the shell's own."""
    shell = ran(["bash", "-c", "compgen -b; compgen -k"])
    start = r"(?:^|[|&;({!@]|\b(?:do|then|else|exec|if|while|until|elif)\b)[ \t]*"
    command = re.compile(start + r"(?:[A-Z_]+=\S+ +)*([a-z][a-z0-9_-]*)(?=[\s;)]|$)", re.MULTILINE)
    called: set[str] = set()
    for script in [*scripts(project), Path("Makefile"), Path("Dockerfile")]:
        text = re.sub(r"(^|\s)#.*", "", (project / script).read_text(encoding="utf-8"))
        called |= set(command.findall(text.replace("\\\n", " ")))
    called -= set(shell.stdout.split())
    called = {name for name in called if shutil.which(name)}
    assert {"bash", "sed", "git", "env"} <= called
    assert {name.replace("-", "_") for name in called} - RESERVED == set()
    assert {"srun", "sbatch", "scontrol", "squeue", "scancel", "mpirun", "docker"} <= RESERVED
    assert {"conftest", "sitecustomize", "usercustomize"} <= RESERVED


def test_no_package_may_hide_one_that_is_locked() -> None:
    for lock in PROJECT_LOCKS.values():
        assert {re.sub(r"[-.]", "_", name) for name in pins(lock)} <= RESERVED, lock.name


# Run by the project's Python: names of packages, and of modules and commands that they install.
INSTALLED = """
from importlib.metadata import distributions
for package in distributions():
    for file in package.files or ():
        if ".." in file.parts and file.parts[-2] == "bin":
            print(package.name, file.name)
        elif not {"..", "-"} & {file.parts[0], *file.parts[0]}:  # no script, no NAME-1.0.dist-info
            print(package.name, file.parts[0])
"""


@pytest.mark.trains
def test_no_package_may_hide_what_locked_ones_install() -> None:
    """Modules at the top level have other names than their packages: nvidia-ml-py's `example`."""
    if not PYTHON.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no project is installed: make demo")
    done = ran([PYTHON, "-c", INSTALLED], check=True)
    locked = {name for lock in PROJECT_LOCKS.values() for name in pins(lock)}
    names: set[str] = set()
    for line in done.stdout.splitlines():
        package, file = line.split(" ", 1)
        name = file.partition(".")[0].lower().replace("-", "_")
        # Answers are made of these characters, and begin with a letter.
        if re.sub(r"[-_.]+", "-", package.lower()) in locked and re.fullmatch("[a-z]\\w*", name):
            names.add(name)
    assert {"torch", "numpy", "yaml", "functorch", "torchrun"} <= names
    assert names - RESERVED == set()


def test_no_package_may_hide_python_s_own_modules() -> None:
    """Of each Python that a project may be used with, whichever runs this."""
    modules = {name for name in sys.stdlib_module_names if not name.startswith("_")}
    assert modules <= PYTHON_MODULES
    of_versions = {"test", "distutils", "asyncore", "telnetlib", "lib2to3"}  # 3.11, 3.12
    assert of_versions <= PYTHON_MODULES
