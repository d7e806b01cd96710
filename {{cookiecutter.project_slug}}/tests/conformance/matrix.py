"""Strategies by properties: what each is shown to compute, how exactly, or why it refuses.

The rows are in the files ``*_rows.py`` of this folder, those of an engine or a family in a file
of its own. A strategy
that is registered and has no row fails the suite, and so does a row of an unknown strategy.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from my_project_trainer import strategies

from .rows import Engine, Portable, Row

MATRIX: dict[str, Row] = {}
PORTABLE: dict[str, Portable] = {}
ENGINES: list[Engine] = []


def rows_files() -> Iterator[ModuleType]:
    """Give the modules of rows, except those of an engine or family whose folder was deleted."""
    for path in sorted(Path(__file__).parent.glob("*_rows.py")):
        module = importlib.import_module(f".{path.stem}", __package__)
        folder = module.ENGINE.name if hasattr(module, "ENGINE") else getattr(module, "FAMILY", "")
        if not folder or _has_source(f"{strategies.__name__}.{folder}"):
            yield module


def _has_source(package: str) -> bool:
    # A folder that only has __pycache__ left is found too, as a namespace package without origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


for _module in rows_files():
    MATRIX |= _module.ROWS
    PORTABLE |= _module.PORTABLE
    ENGINES += [_module.ENGINE] if hasattr(_module, "ENGINE") else []
