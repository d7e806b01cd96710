"""Writes the maps of the trainer into docs/design.md of the template and of the rendered project.

`make tables` runs this file; test_docs.py fails where a page is not up to date. A folder's purpose
is the first line of the docstring of its ``__init__.py``, and its floor follows from its imports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from local_extensions import COMPONENTS

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
TRAINER = TEMPLATE / "src" / "{{cookiecutter.package_name}}_trainer"
DESIGN = ROOT / "docs" / "design.md"
PROJECT_DESIGN = TEMPLATE / "docs" / "design.md"
MARK = "`make tables` from the folders of the trainer: "


@cache
def modules() -> dict[str, Path]:
    """Return the trainer's modules and packages by their dotted names; ``__init__`` is ``""``."""
    paths: dict[str, Path] = {}
    for path in sorted(TRAINER.rglob("*.py")):
        parts = path.relative_to(TRAINER).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(name: str) -> set[str]:
    """Return the modules of the trainer that a module imports, for types too."""
    path = modules()[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [word for word in package if word]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not 0 < node.level <= len(package) + 1:
            continue
        base = package[: len(package) + 1 - node.level]
        base += node.module.split(".") if node.module else []
        for alias in node.names:
            inside = ".".join([*base, alias.name])
            imported.add(inside if inside in modules() else ".".join(base))
    return imported - {name}


@cache
def entries() -> dict[str, frozenset[str]]:
    """Return the trainer's entries, each with the other entries that its files import."""
    imported: dict[str, set[str]] = {}
    for name in filter(None, modules()):
        entry = name.split(".")[0]
        others = {other.split(".")[0] for other in imports(name)}
        imported.setdefault(entry, set()).update(others - {entry, ""})
    return {entry: frozenset(others) for entry, others in imported.items()}


@cache
def floor(entry: str) -> int:
    """Return an entry's floor: one above the highest that it imports from, 0 without imports."""
    return max((floor(other) + 1 for other in entries()[entry]), default=0)


def from_the_top(names: Iterable[str]) -> list[str]:
    """Return entries in order: the top floor first."""
    return sorted(names, key=lambda name: (-floor(name), name))


def label(name: str) -> str:
    """Return a module's last name as a file or a folder: ``errors.py``, ``loop/``."""
    path = modules()[name]
    return f"{path.parent.name}/" if path.name == "__init__.py" else path.name


def purpose(name: str) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(modules()[name].read_text(encoding="utf-8")))
    assert docstring, f"{modules()[name]} has no docstring"
    return docstring.splitlines()[0]


def tree() -> str:
    """Return the trainer's folders as a tree, with their purposes."""
    lines = [("PACKAGE_trainer/", purpose(""))]
    for entry in from_the_top(entries()):
        inside = (name for name in modules() if name.startswith(f"{entry}."))
        folders = (name for name in inside if modules()[name].name == "__init__.py")
        for name in (entry, *sorted(folders)):
            indent = "    " * (name.count(".") + 1)
            lines.append((indent + label(name), purpose(name)))
    width = max(len(name) for name, _ in lines) + 2
    rows = (f"{name:{width}}{text}".replace("``", "") for name, text in lines)
    return "\n".join(["```", *rows, "```"])


def floors() -> str:
    """Return one row for each floor: its entries, and what they import from."""
    rows = ["| floor | entry | imports from |", "|---|---|---|"]
    for entry in from_the_top(entries()):
        others = from_the_top(entries()[entry])
        cells = (str(floor(entry)), f"`{label(entry)}`", ", ".join(f"`{label(o)}`" for o in others))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def short_map() -> str:
    """Return one row for each of the trainer's entries, from the top floor down."""
    rows = ["| in the trainer | what it is for |", "|---|---|"]
    for entry in from_the_top(entries()):
        row = f"| `{label(entry)}` | {purpose(entry).replace('``', '`')} |"
        asked = f'{{%- if cookiecutter.{entry} == "yes" %}}\n{row}\n{{%- endif %}}'
        rows.append(asked if entry in COMPONENTS else row)
    return "\n".join(rows)


def page(text: str, content: str) -> str:
    """Return a page with its generated part replaced."""
    between = re.compile(rf"({MARK}begin -->).*(\n<!-- made by [^\n]*{MARK}end -->)", re.DOTALL)
    new, count = between.subn(lambda found: f"{found[1]}\n\n{content}\n{found[2]}", text)
    assert count == 1
    return new


def pages() -> dict[Path, str]:
    """Return the pages that hold a map, as they must be."""
    maps = {DESIGN: f"{tree()}\n\n{floors()}", PROJECT_DESIGN: short_map()}
    return {path: page(path.read_text(encoding="utf-8"), text) for path, text in maps.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
