"""What a render holds, whatever was answered."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from linters import lint_python
from rendering import (
    DEFAULTS,
    ROOT,
    TEMPLATE,
    expected_files,
    git,
    metadata,
    render,
    template_files,
)

import local_extensions


def test_the_render_holds_the_template_s_files_and_no_others(project: Path) -> None:
    expected = expected_files(DEFAULTS)
    assert set(git(project, "ls-files").splitlines()) == set(expected)
    for needed in ("LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py", ".gitignore"):
        assert needed in expected
    assert "src/my_project_trainer/py.typed" in expected


def test_python_files_hold_no_jinja() -> None:
    for file in template_files():
        if file.suffix == ".py":
            assert "cookiecutter." not in (TEMPLATE / file).read_text(encoding="utf-8"), file


def test_the_metadata_name_what_the_project_needs(project: Path) -> None:
    built = metadata(project)
    needs = [need for need in built.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(needs) == [
        *("jinja2>=3.1", "jsonargparse[signatures]<5,>=4.49", "numpy", "nvidia-ml-py", "pyyaml"),
        *("rich", "safetensors>=0.8", "tensorboard", "torch>=2.10", "torchmetrics"),
        "vl-convert-python<2,>=1.7",
    ]
    assert built["Requires-Python"] == ">=3.11"
    assert built["Author"] == "Your Name"
    assert built["License-Expression"] == "MIT"


@pytest.mark.parametrize(
    ("name", "expression", "first"),
    [
        ("MIT", "MIT", "MIT License"),
        ("Apache-2.0", "Apache-2.0 AND MIT", "Apache License"),
        ("BSD-3-Clause", "BSD-3-Clause AND MIT", "BSD 3-Clause License"),
        ("Proprietary", "LicenseRef-Proprietary AND MIT", "All rights reserved"),
    ],
)
def test_every_license(tmp_path: Path, name: str, expression: str, first: str) -> None:
    answers = {"license": name, "author_name": "Zoë O'Brien", "package_name": "p"}
    project = render(tmp_path, answers)
    text = (project / "LICENSE").read_text(encoding="utf-8")
    assert first in text.split("\n\n")[0] + text.splitlines()[1]
    assert re.search(r"Copyright (\(c\) )?20\d\d Zoë O'Brien", text)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    built = metadata(project)
    assert built["License-Expression"] == expression
    # The template's own license goes along with its code, into packages and images too.
    notice = "src/p_trainer/LICENSE"
    assert built.get_all("License-File") == ["LICENSE", notice]
    assert (project / notice).read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (notice in text) == (name == "Proprietary")


@pytest.mark.parametrize("package", ["a", "zz", "p" * 40])
def test_tests_are_in_form_whatever_the_package_is_called(tmp_path: Path, package: str) -> None:
    """They import the package by its name, which neither order nor line breaks may hang on."""
    project = render(tmp_path, {"package_name": package})
    text = (project / "tests" / "test_tasks.py").read_text("utf-8")
    assert f"\nimport {package}_trainer as trainer\n" in text
    assert lint_python(project) == ""
    assert f"-m {package} fit" in (project / "Makefile").read_text(encoding="utf-8")


def test_a_user_s_tests_are_few_and_no_file_of_tests_is_long(project: Path) -> None:
    def lines(files: Iterable[Path]) -> dict[str, int]:
        return {str(file): len(file.read_text("utf-8").splitlines()) for file in files}

    project_tests = lines((project / "tests").rglob("*.py"))
    assert sum(project_tests.values()) <= 4000
    both = project_tests | lines((ROOT / "tests").rglob("*.py"))
    long = {name: count for name, count in both.items() if count > 400}
    assert long == {}


def test_the_render_says_which_template_made_it(project: Path) -> None:
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    assert table["tool"]["cookiecutter-distributed-torch"] == {
        "version": "0.1.0",
        "parts": "all",
        "trainer": "source",
        "components": list(local_extensions.COMPONENTS),
        "optional_examples": [],
        "places": [],
    }
