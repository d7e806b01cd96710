"""Remove parts that were left out and empty conditional folders; print the next steps.

Cookiecutter runs this file in the new project's folder, after rendering it as a template: so it
holds no answer and no brace pair that Jinja would read. It makes no repository: `make setup` does,
once cruft has written its `.cruft.json`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from pathlib import Path

COMPONENTS = (
    "deepspeed",
    "fairscale",
    "horovod",
    "xla",
    "model_parallel",
    "asynchronous",
    "legacy",
    "tools",
)
# All files and folders of a component: they bear its name. Their names hold no condition, because
# Python files are copied and not rendered, and because locks are made in the template's own tree.
OF_COMPONENT = (
    "requirements/%s.*",
    "src/*_trainer/%s",
    "src/*_trainer/strategies/%s",
    "tests/test_%s*.py",
    "tests/%s_*.py",
    "tests/conformance/%s_*.py",
)
# Of the page on `tools`' command `report`; pages that were left out are empty.
PICTURES = "docs/report-*.webp"
# What `parts=core` leaves out besides: the tests start processes without a fork server, too.
NOT_IN_CORE = ("tests/gpu", "tests/fork_server*.py")
# Each example has one task and one config, whose names hold a condition, and packages.
EXAMPLES = ("lora", "images", "graph", "streaming")
OF_EXAMPLE = ("requirements/%s.in", "requirements/%s.txt")
# Of each place to train besides SLURM. Not its whole folder: the user may have one of that name.
OF_PLACES = {
    "kubernetes": ("kubernetes/jobset.yaml", "kubernetes/setup.yaml", "kubernetes/trainjob.yaml"),
    "ssh": ("ssh/host.sh", "ssh/train.sh"),
}
# Cookiecutter takes a name that is empty under a condition for files only, and makes these folders
# where all their files are left out. They are removed if they are empty.
CONDITIONAL = (".github/workflows", ".github", ".vscode", ".devcontainer", *OF_PLACES)
NEXT_STEPS = """
The project is ready. Next:
  cd %s
  make setup    # install it into .venv, and make a git repository with a first commit
                # on a machine without a GPU, for a cluster with GPUs: make setup VARIANT=cuda
  make train    # train a classifier of handwritten digits, in under a minute
README.md has the rest.
"""


def included(settings: str, name: str, known: tuple[str, ...]) -> list[str]:
    """Return which of a kind the project includes, as its pyproject.toml says."""
    # Without tomllib, for cookiecutter may run by a Python before 3.11.
    listed = re.search(rf"^{name} = \[(.*)\]$", settings, re.MULTILINE)
    return re.findall(r'"(\w+)"', listed[1]) if listed else list(known)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_pages() -> None:
    """Remove pages that were rendered empty, and the folders that held nothing else."""
    for page in list(Path("docs").rglob("*.md")):
        if not page.stat().st_size:
            page.unlink()
            remove_empty(page.parent)


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is there and holds nothing."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def main() -> None:
    """Finish the render in the current folder."""
    settings = Path("pyproject.toml").read_text(encoding="utf-8")
    components = included(settings, "components", COMPONENTS)
    examples = included(settings, "optional_examples", EXAMPLES)
    places = included(settings, "places", tuple(OF_PLACES))
    patterns = [each % name for name in set(COMPONENTS) - set(components) for each in OF_COMPONENT]
    patterns += [each % name for name in set(EXAMPLES) - set(examples) for each in OF_EXAMPLE]
    for place in OF_PLACES.keys() - places:
        patterns += OF_PLACES[place]
    patterns += [] if "tools" in components else [PICTURES]
    patterns += NOT_IN_CORE if '\nparts = "core"\n' in settings else []
    for pattern in patterns:
        for path in list(Path().glob(pattern)):
            remove(path)
    remove_pages()
    for folder in CONDITIONAL:
        remove_empty(Path(folder))
    if "DISTRIBUTED_TORCH_QUIET" in os.environ:  # a render that cruft compares and removes
        return
    # A hook that fails removes the project: neither a closed pipe nor an odd locale may fail it.
    with contextlib.suppress(OSError):
        os.write(1, os.fsencode(NEXT_STEPS % shlex.quote(os.getcwd())))  # noqa: PTH109


if __name__ == "__main__":
    main()
