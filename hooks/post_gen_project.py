"""Remove parts that were left out and empty folders, pack the trainer; print the next steps.

Cookiecutter runs this file in the new project's folder, after rendering it as a template: so it
holds no answer and no brace pair that Jinja would read. It makes no repository: `make setup` does,
once cruft has written its `.cruft.json`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterable
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
# What `trainer=wheel` leaves out once the trainer is packed: its sources, and its tests.
PACKED = (
    "src/*_trainer",
    "tests/conformance",
    "tests/gpu",
    "tests/fork_server*.py",
    *(f"tests/test_{engine}.py" for engine in COMPONENTS),
)
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


def pack(trainer: Path, settings: str) -> None:
    """Write a wheel of the trainer into wheels/, and the lock that installs it.

    The same sources give the same bytes: sorted, without dates, and stored, for compressed bytes
    depend on the version of zlib. The version ends with a hash of the content.
    """
    files = {
        path.relative_to(trainer.parent).as_posix(): path.read_bytes()
        for path in trainer.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    content = hashlib.sha256()
    for name in sorted(files):
        content.update(hashlib.sha256(files[name]).digest() + name.encode())
    own = settings[settings.index("[tool.cookiecutter-distributed-torch]") :]
    base = re.search(r'^version = "(.+)"$', own, re.MULTILINE)
    version = f"{base[1] if base else 0}+{content.hexdigest()[:12]}"
    needed = re.search(r"^dependencies = \[\n(.*?)^\]", settings, re.MULTILINE | re.DOTALL)
    requirements = re.findall(r'^ *"(.+)",?$', needed[1], re.MULTILINE) if needed else []
    described = f"{trainer.name}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {trainer.name.replace('_', '-')}",
        f"Version: {version}",
        "License-Expression: MIT",
        "License-File: LICENSE",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {each}" for each in requirements),
    ]
    tags = ["Wheel-Version: 1.0", "Generator: post_gen_project", "Root-Is-Purelib: true"]
    files[f"{described}/METADATA"] = "\n".join([*metadata, ""]).encode()
    files[f"{described}/WHEEL"] = "\n".join([*tags, "Tag: py3-none-any", ""]).encode()
    files[f"{described}/licenses/LICENSE"] = files[f"{trainer.name}/LICENSE"]
    listed = [f"{name},{digest(files[name])},{len(files[name])}" for name in sorted(files)]
    record = f"{described}/RECORD"
    files[record] = "\n".join([*listed, f"{record},,", ""]).encode()
    wheel = Path("wheels", f"{trainer.name}-{version}-py3-none-any.whl")
    wheel.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files, key=lambda name: (name.startswith(described), name)):
            entry = zipfile.ZipInfo(name)  # of 1980
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            archive.writestr(entry, files[name])
    hashed = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock = f"# The trainer; `make eject` unpacks it.\n./{wheel.as_posix()} --hash=sha256:{hashed}\n"
    Path("requirements", "trainer.txt").write_text(lock, encoding="utf-8")


def digest(content: bytes) -> str:
    """Return the hash of a file as a wheel's RECORD has it."""
    hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={hashed.decode().rstrip('=')}"


def remove_all(patterns: Iterable[str]) -> None:
    """Remove all files and folders that match one of the patterns."""
    for pattern in patterns:
        for path in list(Path().glob(pattern)):
            remove(path)


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
    remove_all(patterns)
    if '\ntrainer = "wheel"\n' in settings:
        for trainer in Path("src").glob("*_trainer"):
            pack(trainer, settings)
        remove_all(PACKED)
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
