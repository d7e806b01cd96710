"""Remove empty conditional folders, and print the next steps.

Cookiecutter runs this file in the new project's folder, after rendering it as a template: so it
holds no answer and no brace pair that Jinja would read. It makes no repository: `make setup` does,
once cruft has written its `.cruft.json`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path

# Cookiecutter takes a name that is empty under a condition for files only, and makes these folders
# where all their files are left out. They are removed if they are empty.
CONDITIONAL = (".github/workflows", ".github")
NEXT_STEPS = """
The project is ready. Next:
  cd %s
  make setup    # install it into .venv, and make a git repository with a first commit
  make train    # train a classifier of handwritten digits, in under a minute
README.md has the rest.
"""


def main() -> None:
    """Finish the render in the current folder."""
    for folder in CONDITIONAL:
        with contextlib.suppress(OSError):  # it holds something, or is not there
            Path(folder).rmdir()
    if "DISTRIBUTED_TORCH_QUIET" in os.environ:  # a render that cruft compares and removes
        return
    # A hook that fails removes the project: neither a closed pipe nor an odd locale may fail it.
    with contextlib.suppress(OSError):
        os.write(1, os.fsencode(NEXT_STEPS % shlex.quote(os.getcwd())))  # noqa: PTH109


if __name__ == "__main__":
    main()
