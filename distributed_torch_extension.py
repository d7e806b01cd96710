"""Loads the rules of the template that is being rendered, each time from their file.

`cruft update` renders two versions of the template in one process, and Python imports a module only
once. Rules that were imported would stay those of the older version, which do not know the newer
version's questions. So `cookiecutter.json` names this module, which holds no rule. It has to stay
as it is: the copy of an older version loads the rules of a newer one.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

RULES = "local_extensions.py"


def template_folder() -> Path:
    """Return the folder of the template that is being rendered.

    Cookiecutter and cruft put it last on `sys.path`.
    """
    here = Path(__file__).name
    for folder in map(Path, reversed(sys.path)):
        if (folder / here).is_file() and (folder / RULES).is_file():
            return folder.resolve()
    return Path(__file__).resolve().parent


def __getattr__(name: str) -> object:
    """Return the class `Answers` of the template that is being rendered."""
    if name != "Answers":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return runpy.run_path(str(template_folder() / RULES), run_name=__name__ + "_rules")[name]
