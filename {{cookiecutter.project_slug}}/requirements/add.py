"""Add packages to `dependencies` in pyproject.toml and to the locks; `make add` runs this.

usage: PACKAGE='NAME NAME==VERSION …' python add.py    with uv on PATH, in the project's environment

Where that fails, no file is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import lock
from install_torch import installed, locked, unlocked

PYPROJECT = lock.HERE.parent / "pyproject.toml"
ON_ONE_LINE = re.compile(r"^dependencies = \[(.*)\]$", re.MULTILINE)
ITEM = re.compile(r"""("[^"]*"|'[^']*')(?:\s*,)?""")
REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[\w,-]+\])?([<>=!~]=?[\w.*+!,<>=~-]+)?")


def name_of(requirement: str) -> str:
    """Return the name in a requirement, in its normal form."""
    match = REQUIREMENT.match(requirement)
    return re.sub(r"[._-]+", "-", match[1]).lower() if match else ""


def with_dependencies(text: str, added: list[str]) -> str:
    """Return the text of pyproject.toml with these dependencies, each replaced or added."""
    names = {name_of(requirement) for requirement in added}
    if line := ON_ONE_LINE.search(text):
        items = "".join(f"    {item}\n" for item in ITEM.findall(line[1]))
        text = text.replace(line[0], f"dependencies = [\n{items}]")
    before, start, rest = text.partition("dependencies = [")
    block, end, after = rest.partition("\n]\n")
    if not end:
        raise SystemExit("add.py: pyproject.toml: write each of `dependencies` on its own line")
    block = re.sub(rf"^(\s*){ITEM.pattern}", r"\1\2,", block, flags=re.MULTILINE)
    kept = [line for line in block.split("\n") if name_of(line.strip(" \"',")) not in names]
    lines = [*kept, *(f'    "{requirement}",' for requirement in added)]
    return before + start + "\n".join(lines) + end + after


def add(added: list[str]) -> None:
    """Write the dependencies and the locks; raise SystemExit where they cannot be installed."""
    text = PYPROJECT.read_text(encoding="utf-8")
    PYPROJECT.write_text(with_dependencies(text, added), encoding="utf-8")
    sys.argv[1:] = ["--keep"]
    try:
        lock.main()
    except subprocess.CalledProcessError as error:
        raise SystemExit("add.py: uv finds no versions; nothing is changed") from error
    # Beside a CPU build of torch, the builds of pip's own index do not work.
    if installed("torch").endswith("+cpu") and (lacking := unlocked(locked())):
        raise SystemExit(
            f"add.py: {lacking[0]}, and no index of CPU builds has it; nothing is changed. "
            "An index that has it: TORCH_INDEX=URL; torch for GPUs: make setup VARIANT=cuda"
        )


def main() -> None:
    """Add what PACKAGE names, or leave every file as it was."""
    added = os.environ.get("PACKAGE", "").split()
    wrong = [each for each in added if not REQUIREMENT.fullmatch(each) or name_of(each) == "torch"]
    if wrong or not added:
        raise SystemExit(
            f"add.py: PACKAGE={' '.join(wrong or added)!r}: give names, such as "
            "make add PACKAGE='timm transformers>=5'; torch's version is in requirements/cpu.in"
        )
    former = {path: path.read_bytes() for path in [PYPROJECT, *lock.HERE.glob("*.txt")]}
    try:
        add(added)
    except BaseException:
        for path, content in former.items():
            path.write_bytes(content)
        raise


if __name__ == "__main__":
    main()
