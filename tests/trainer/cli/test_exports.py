"""Folders of the trainer say what they are for, and export names that exist."""

import ast
import importlib
import re

from tests.project import PACKAGE, ROOT

TRAINER = ROOT / "src" / f"{PACKAGE}_trainer"
FOLDERS = sorted(path.parent for path in TRAINER.glob("*/__init__.py"))


def test_each_folder_says_what_it_is_for_and_what_it_imports():
    for folder in FOLDERS:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert re.search(r"\b[Ii]mports\b", text), folder.name


def test_what_a_folder_exports_is_there():
    for folder in FOLDERS:
        module = importlib.import_module(f"{PACKAGE}_trainer.{folder.name}")
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{folder.name}.{name}"
