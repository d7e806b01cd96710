"""How the tests render the template, and what they expect of a render."""

from __future__ import annotations

import email
import email.message
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from cookiecutter.main import cookiecutter
from jinja2 import Template

from local_extensions import COMPONENTS, EXAMPLES, PLACES, examples, has_page, places

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
# What editors, tests and tools leave in a tree; none of it is the template's.
LEFTOVERS = {
    *("__pycache__", ".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv"),
    *("build", "runs"),
}
DEFAULTS = {
    "project_name": "My Project",
    "author_name": "Your Name",
    "parts": "all",
    "project_slug": "my-project",
    "package_name": "my_project",
    "description": "A PyTorch project that trains on one or many processes.",
    "author_email": "",
    "version": "0.1.0",
    "license": "MIT",
    "examples": "basic",
    **dict.fromkeys(COMPONENTS, "yes"),
    "trainer": "source",
    "torch_variant": "auto",
    "slurm_partition": "",
    "slurm_account": "",
    "gpus_per_node": "1",
    "container_runtime": "none",
    "other_launchers": "none",
    "ci": "github",
    "updates": "none",
    "pre_commit": "no",
    "editor": "none",
}
# The answers that `parts=core` gives by itself.
CORE = {"parts": "core", **dict.fromkeys(COMPONENTS, "no")}
# What the command prints in the end, with the project's folder.
NEXT_STEPS = """
The project is ready. Next:
  cd %s
  make setup    # install it into .venv, and make a git repository with a first commit
                # on a machine without a GPU, for a cluster with GPUs: make setup VARIANT=cuda
  make train    # train a classifier of handwritten digits, in under a minute
README.md has the rest.
"""


def render(output: Path, answers: dict[str, str] | None = None, *, hooks: bool = False) -> Path:
    """Render in this process, as `--no-input` does, and return the project's folder."""
    return Path(
        cookiecutter(
            str(ROOT),
            no_input=True,
            extra_context=answers,
            output_dir=str(output),
            accept_hooks=hooks,
        )
    )


def command(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the real `cookiecutter` command on the template."""
    cookiecutter_command = [sys.executable, "-m", "cookiecutter", str(ROOT), *arguments]
    return ran(cookiecutter_command, cwd=cwd, input=stdin)


def ran(command: Sequence[str | os.PathLike[str]], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return what it has printed; see `subprocess.run`."""
    options = {"capture_output": True, "text": True, "timeout": 600} | how
    return subprocess.run(command, **options)


def git(project: Path, *arguments: str) -> str:
    return ran(["git", *arguments], cwd=project, check=True).stdout


def make_repository(project: Path) -> str:
    """Make a render a git repository with one commit, as `make setup` does; return what it says."""
    return ran(["bash", project / "requirements" / "repository.sh"], check=True).stdout


def template_files(top: Path = TEMPLATE) -> list[Path]:
    """Return every file of the template, or of another folder, relative to it; git isn't asked."""
    paths: list[Path] = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in LEFTOVERS and "egg-info" not in name]
        paths += [Path(folder, name).relative_to(top) for name in files]
    return sorted(paths)


@cache
def _names() -> dict[Path, Template]:
    return {file: Template(str(file)) for file in template_files()}


def removed_by_hook(answers: dict[str, str]) -> set[str]:
    """Return what a render has only where no hook runs, but for files that bear a part's name."""
    left_out = set(EXAMPLES) - set(examples(answers))
    removed = {f"requirements/{name}.{kind}" for name in left_out for kind in ("in", "txt")}
    for place in set(PLACES) - set(places(answers)):
        removed |= {f"{place}/{file}" for file in template_files(TEMPLATE / place)}
    files = set(map(str, template_files()))
    removed |= {file for file in files if file.endswith(".md") and not has_page(answers, file)}
    if answers["tools"] == "no":
        removed |= {f"docs/report-{theme}.webp" for theme in ("dark", "light")}
    if answers["parts"] == "core":
        removed |= {file for file in files if file.startswith(("tests/gpu/", "tests/fork_server"))}
    if answers["trainer"] == "wheel":
        package = "src/{{cookiecutter.package_name}}_trainer/"
        packed = ("tests/conformance/", "tests/gpu/", "tests/fork_server", package)
        engines = {f"tests/test_{component}.py" for component in COMPONENTS}
        removed |= {file for file in files if file.startswith(packed)} | engines
        name = answers["package_name"]
        removed = {file.replace("{{cookiecutter.package_name}}", name) for file in removed}
    return removed


def expected_files(answers: dict[str, str]) -> dict[str, Path]:
    """Return the files of a render with these answers, each with the template's file it is from.

    A file with a condition bears it in its name, which is empty where the condition does not hold.
    The hook removes the files of a component that was left out, which bear its name, and what
    `removed_by_hook` lists.
    """
    removed = removed_by_hook(answers)
    left_out = [component for component in COMPONENTS if answers[component] == "no"]
    names = {file: name.render(cookiecutter=answers) for file, name in _names().items()}
    return {
        name: file
        for file, name in names.items()
        if name and not name.endswith("/") and name not in removed
        if not any(component in name for component in left_out)
    }


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def braces_left(project: Path, names: Iterable[str]) -> list[str]:
    """Return those of these files of a render in which something of Jinja's is left.

    Python files are copied as they are, tests but for the package's name. `${{ … }}` is GitHub's,
    and `${#…}` bash's.
    """
    pattern = re.compile(r"(?<!\$)\{\{|\{%|(?<!\$)\{#|cookiecutter\.")
    others = [name for name in names if not name.endswith((".py", ".webp"))]
    return [name for name in others if pattern.search((project / name).read_text(encoding="utf-8"))]


def metadata(project: Path) -> email.message.Message:
    """Return the metadata that setuptools builds from a render, as pip would read them."""
    from setuptools import Distribution

    before = Path.cwd()
    os.chdir(project)
    try:
        distribution = Distribution()
        distribution.parse_config_files()
        text = io.StringIO()
        distribution.metadata.write_pkg_file(text)
    finally:
        os.chdir(before)
    return email.message_from_string(text.getvalue())


def check_works(project: Path, answers: dict[str, str]) -> None:
    """Assert that a render holds exactly these answers and is a project that works."""
    assert project.name == answers["project_slug"]
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert table["name"] == answers["project_slug"]
    assert table["version"] == answers["version"]
    assert table["description"] == answers["description"]
    author = {"name": answers["author_name"]}
    if answers["author_email"]:
        author["email"] = answers["author_email"]
    assert table["authors"] == [author]
    assert table["scripts"] == {answers["project_slug"]: f"{answers['package_name']}.__main__:main"}
    if answers["license"] != "Apache-2.0":
        assert answers["author_name"] in (project / "LICENSE").read_text(encoding="utf-8")

    built = metadata(project)
    assert built["Name"] == answers["project_slug"]
    assert built["Version"] == answers["version"]
    assert built["Summary"] == (answers["description"] or None)

    expected = expected_files(answers)
    there = {name for name in tree(project) if (project / name).is_file()}
    there = {name for name in there if not name.startswith(".git/")} - removed_by_hook(answers)
    made = {name for name in there if name.startswith("wheels/") or name.endswith("/trainer.txt")}
    assert len(made) == (2 if answers["trainer"] == "wheel" else 0)
    there -= made
    assert there == set(expected)
    for name, file in expected.items():
        if name.endswith(".py"):
            source = (TEMPLATE / file).read_text(encoding="utf-8")
            if not name.startswith(f"src/{answers['package_name']}_trainer/"):
                source = re.sub(r"\bmy_project(?=_trainer\b|\b)", answers["package_name"], source)
            rendered = (project / name).read_text(encoding="utf-8")
            assert rendered == source, f"{file} was changed by rendering"
        elif name.endswith((".yaml", ".yml")):
            list(yaml.safe_load_all((project / name).read_text(encoding="utf-8")))
