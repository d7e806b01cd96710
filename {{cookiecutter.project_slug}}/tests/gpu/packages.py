"""The small packages that the checks need beside torch: which are missing, and how to bring them.

usage: python tests/gpu/packages.py [FOLDER [VERSION]]

says which this Python lacks (exit code 2), or, with FOLDER, installs all of them there, by the
hashes of the locks and without what they need: no torch comes along, and the environment stays as
it is. With VERSION (3.12) they are for that Python on Linux on x86-64, to be carried to another
machine. Wheels in requirements/wheels are found too; without a network, set PIP_NO_INDEX=1.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
LOCKS = ("cpu.txt", "dev.txt")
FOLDER = "build/gpu-tools"
# What is imported, and its package.
IMPORTED = {
    "numpy": "numpy",
    "docstring_parser": "docstring-parser",
    "jsonargparse": "jsonargparse",
    "psutil": "psutil",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "rich": "rich",
    "safetensors": "safetensors",
    "torchmetrics": "torchmetrics",
    "typeshed_client": "typeshed-client",
    "yaml": "pyyaml",
}
# What these import in turn, and the driver's library for Python. Not numpy, which is large and
# comes with torch.
INSTALLED = sorted(
    {
        *(name for name in IMPORTED.values() if name != "numpy"),
        *("iniconfig", "lightning-utilities", "markdown-it-py", "mdurl", "nvidia-ml-py"),
        *("packaging", "pluggy", "pygments"),
    }
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def missing() -> str | None:
    """Return one line that names the missing packages and says what to do; ``None`` if all are."""
    names = [name for module, name in IMPORTED.items() if not importlib.util.find_spec(module)]
    if not names:
        return None
    return (
        f"{sys.executable} lacks {', '.join(names)}: run `make gpu-tools`, which installs them "
        f"into {FOLDER} and changes nothing else; without a network, run it elsewhere "
        f"(FOR={sys.version_info.major}.{sys.version_info.minor}) and copy that folder here"
    )


def locked(names: Sequence[str]) -> str:
    """Return the entries of packages in the project's locks, with their hashes."""
    text = "\n".join((REQUIREMENTS / lock).read_text(encoding="utf-8") for lock in LOCKS)
    pairs = dict(re.findall(r"^(([a-z0-9-]+)==[^\n\\]*(?:\\\n[^\n\\]*)*)", text, re.MULTILINE))
    entries = {name: entry for entry, name in pairs.items()}
    return "\n".join(entries[name] for name in names) + "\n"


def command(requirements: str, folder: str, version: str | None) -> list[str]:
    """Return the command that installs what a file of requirements names into a folder."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder]
    line += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile"]
    line += ["--find-links", str(REQUIREMENTS / "wheels"), "--requirement", requirements]
    if version is not None:
        line += ["--python-version", version, "--implementation", "cp"]
        line += [word for platform in PLATFORMS for word in ("--platform", platform)]
    return line


def main(folder: str | None = None, version: str | None = None) -> int:
    if folder is None:
        lacking = missing()
        print(lacking or "none is missing", file=sys.stderr)
        return 2 if lacking else 0
    with tempfile.TemporaryDirectory() as place:
        requirements = Path(place) / "gpu.txt"
        requirements.write_text(locked(INSTALLED), encoding="utf-8")
        code = subprocess.run(command(str(requirements), folder, version)).returncode
    if code:
        print(f"the packages of the checks were not installed into {folder}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
