"""The trainer's folders import downward only, and its files never in a circle; types count too."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from tests.project import PACKAGE, ROOT

TRAINER = ROOT / "src" / f"{PACKAGE}_trainer"
# From the ground up; a file imports from its own folder, and from folders on floors below.
FLOORS = [
    {"errors"},
    {"options"},
    {"launch"},
    {"checkpoint", "logging"},
    {"module"},
    {"callbacks"},
    {"data"},
    {"memory"},
    {"strategies"},
    {"loop"},
    {"run"},
    {"trainer"},
    {"legacy"},
    {"cli"},
    {"tools"},
]


def modules() -> dict[str, Path]:
    """The trainer's modules and packages by their dotted names; its own ``__init__`` is ``""``."""
    paths: dict[str, Path] = {}
    for path in sorted(TRAINER.rglob("*.py")):
        parts = path.relative_to(TRAINER).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the trainer that a file imports, at whatever place, for types alone too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [word for word in package if word]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not 0 < node.level <= len(package) + 1:
            continue
        base = package[: len(package) + 1 - node.level]
        base += node.module.split(".") if node.module else []
        for alias in node.names:
            inside = ".".join([*base, alias.name])
            imported.add(inside if inside in known else ".".join(base))
    return imported - {name}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def test_no_file_imports_itself_round_a_circle():
    assert len(list(TopologicalSorter(graph()).static_order())) == len(modules())


def test_folders_import_downward_only():
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    assert floor.keys() == {name.split(".")[0] for name in graph() if name}
    upward = [
        f"{name} imports {other or 'the package'}"
        for name, others in graph().items()
        for other in others
        if name and other.split(".")[0] != (head := name.split(".")[0])
        if floor.get(other.split(".")[0], len(FLOORS)) >= floor[head]
    ]
    assert upward == []


def test_the_trainers_folder_fits_on_one_screen():
    assert len({name.split(".")[0] for name in modules() if name}) <= 16


def test_text_files_are_utf_8_whatever_the_locale() -> None:
    rule = ["--isolated", "--no-cache", "--preview", "--select", "PLW1514", str(TRAINER)]
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", *rule]
    assert subprocess.run(command, capture_output=True, text=True, timeout=600).stdout == ""


def test_messages_are_printed_where_an_output_may_be_lost() -> None:
    texts = {path: path.read_text("utf-8") for path in TRAINER.rglob("*.py")}
    assert [path for path, text in texts.items() if "file=sys.stderr" in text] == []
