"""From which files classes are imported: never from a run directory.

A configuration names classes, and the working directory is on ``sys.path``: without this, testing
a run of somebody else would import the code that they put into its directory.
"""

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from ..checkpoint import run_directory
from ..launch import files

TRUST = "--trust"
_OURS = {files.TRAINER, files.sources() / files.PACKAGE}
_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
INSTALLED = tuple(sysconfig.get_path(kind) + os.sep for kind in _KINDS)  # thousands, unchecked


class _Finder(MetaPathFinder):
    """Finds what Python's own finder finds, and refuses some of it."""

    def __init__(self, from_run: bool) -> None:
        self._from_run = from_run

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        origin = spec.origin if spec is not None and spec.has_location else None
        if origin is not None and not origin.startswith(INSTALLED):
            self._check(Path(origin).absolute())
        return spec

    def _check(self, file: Path) -> None:
        entries = [Path(path).absolute() for path in sys.path]
        entry = max((folder for folder in entries if folder in file.parents), default=file.parent)
        real, found_by = file.resolve(), entry.resolve()
        above = {entry, *entry.parents, found_by, *found_by.parents, *_OURS, *files.TRAINER.parents}
        shown = files.shown(file, Path.cwd())
        for folder in sorted({*file.parents, *real.parents} - above):
            if run_directory.is_run(folder):
                why = f"is in a run directory ({folder.name}), and code of a run is never imported"
                raise ImportError(f"{shown} {why}; move it to where your code is, if you trust it")
        if self._from_run and Path.cwd().is_relative_to(found_by) and not _OURS & {*real.parents}:
            why = "is neither in this package nor installed, and is named by a run's configuration"
            raise ImportError(f"{shown} {why}; if you trust it, add {TRUST} (in Python trust=True)")


@contextlib.contextmanager
def checked(from_run: bool = False) -> Iterator[None]:
    """Refuse to import code of run directories in this context, by an ``ImportError``.

    ``from_run``: also what the working directory finds, as a run's configuration names the classes.
    """
    finder, meta_path = _Finder(from_run), sys.meta_path
    ours = (other is PathFinder or isinstance(other, _Finder) for other in meta_path)
    meta_path.insert(list(ours).index(True), finder)
    try:
        yield
    finally:
        meta_path.remove(finder)
