"""Install torch into the environment of the Python that runs this, checked by hash.

usage: python install_torch.py cpu|cuda|newest [OPTION OF PIP …]

cpu      the CPU build of torch-cpu.txt, from the first that has it: TORCH_INDEX (environment), what
         pip is configured with, PyTorch's own index. Where none has it, and on macOS, torch.txt's
         build from pip's index, which on Linux brings CUDA and is larger
cuda     torch.txt's build, with CUDA's libraries (cuda.txt)
newest   not locked, so without hashes: the newest CPU build of TORCH_INDEX or of PyTorch's own
         index; where neither can be reached, nothing
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# An index that does not answer is passed over: how pip looks, and for how many seconds at most.
LOOKING = {"PIP_RETRIES": "0", "PIP_TIMEOUT": "10"}
LONGEST_LOOK = 30.0
LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class Source:
    """Where a CPU build may come from; without an index, what pip is configured with."""

    name: str
    index: str = ""

    def variables(self, looking: bool) -> dict[str, str]:
        """Return pip's variables: other users of the machine could see the words of a command."""
        if not self.index:
            return {}
        alone = {"PIP_INDEX_URL": self.index, "PIP_EXTRA_INDEX_URL": ""}
        return alone | LOOKING if looking else alone


OWN = Source("what pip is configured with")


def named_sources() -> list[Source]:
    """Return the user's index where one is given, and PyTorch's."""
    given = os.environ.get("TORCH_INDEX", "")
    mine = [Source(f"TORCH_INDEX ({hidden(given)})", given)] if given else []
    return [*mine, Source(PYTORCH_INDEX, PYTORCH_INDEX)]


def hidden(address: str) -> str:
    """Return an address without its user and password."""
    return re.sub("://[^/]*@", "://****@", address)


def cpu_line(version: str, python: str, machine: str) -> str:
    """Return how torch-cpu.txt asks for the CPU build of a Python and a machine."""
    return (
        f"torch=={version}+cpu ; python_version == '{python}' and sys_platform == 'linux' "
        f"and platform_machine == '{machine}'"
    )


def say(line: str) -> None:
    """Print a line at once, before what pip prints."""
    print(f"install_torch.py: {line}", file=sys.stderr, flush=True)


def pip(*words: str, source: Source, looking: bool = False) -> subprocess.CompletedProcess[str]:
    """Run this environment's pip on a source; raise TimeoutExpired where a look takes too long."""
    return subprocess.run(
        [sys.executable, "-m", "pip", *words],
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | source.variables(looking),
        timeout=LONGEST_LOOK if looking and source.index else None,
        capture_output=True,
        text=True,
        check=False,
    )


def versions(source: Source, options: list[str]) -> list[str]:
    """Return the versions of torch that a source has for this Python; none if it is silent."""
    words = ["index", "versions", "torch", "--only-binary", ":all:", *options]
    try:
        done = pip(*words, source=source, looking=True)
    except subprocess.TimeoutExpired:
        return []
    found = re.search("^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


def install(*words: str, source: Source = OWN) -> str:
    """Install without dependencies, which the locks name; return pip's error, or nothing."""
    done = pip("install", "--quiet", "--no-deps", *words, source=source)
    if done.returncode == 0:
        return ""
    if "DO NOT MATCH THE HASHES" in done.stderr:
        return "its hash is not the locked one"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else done.stderr.strip()


def install_locked(lock: str, *options: str, source: Source = OWN) -> str:
    """Install what a lock holds, as wheels whose hashes are checked; return pip's error."""
    words = ("--require-hashes", "--only-binary", ":all:", *options)
    return install(*words, "--requirement", lock, source=source)


def install_cpu_build(version: str, options: list[str]) -> bool:
    """Install the locked CPU build from the first source that has it; say why others do not."""
    python = ".".join(platform.python_version_tuple()[:2])
    lock = HERE / "torch-cpu.txt"
    if cpu_line(version, python, platform.machine()) not in lock.read_text(encoding="utf-8"):
        machine = platform.machine()
        say(f"torch-cpu.txt has no hash for Python {python} on {machine} (`make lock` adds it)")
        return False
    sources = named_sources()
    # What the user names goes first.
    sources.insert(len(sources) - 1, OWN)
    for source in sources:
        if f"{version}+cpu" not in versions(source, options):
            say(f"{source.name}: no torch {version}+cpu for this Python, or no answer")
        elif error := install_locked(str(lock), *options, source=source):
            say(f"{source.name}: torch {version}+cpu is not installed: {error}")
        else:
            return True
    return False


def install_plain_build(version: str, options: list[str]) -> None:
    """Install the build of pip's own index, and on Linux the libraries of CUDA that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        # `==` would take a CPU build that pip knows, whose hash is not in this lock.
        lock = Path(folder, "torch.txt")
        text = (HERE / "torch.txt").read_text(encoding="utf-8")
        lock.write_text(text.replace("torch==", "torch===", 1), encoding="utf-8")
        error = install_locked(str(lock), *options)
    if not error and LINUX:
        error = install_locked(str(HERE / "cuda.txt"), *options)
    if error:
        raise SystemExit(f"install_torch.py: torch {version} could not be installed: {error}")


def install_newest(options: list[str]) -> None:
    """Install the newest CPU build, where an index of such builds can be reached."""
    for source in named_sources() if LINUX else []:
        if versions(source, options) and not install("torch", *options, source=source):
            return
    say("no index of CPU builds answers: pip takes torch from its own")


def installed() -> str:
    """Return the version of torch in this environment, or nothing."""
    try:
        return installed_version("torch")
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Install the build that is asked for."""
    kind, *options = sys.argv[1:] or [""]
    if kind not in ("cpu", "cuda", "newest"):
        raise SystemExit("usage: python install_torch.py cpu|cuda|newest [OPTION OF PIP …]")
    if kind == "newest":
        return install_newest(options)
    locked = re.search(r"^torch==(\S+)", (HERE / "torch.txt").read_text(encoding="utf-8"), re.M)
    assert locked, "torch.txt has no torch"  # noqa: S101
    version = locked[1]
    if kind == "cpu" and LINUX:
        if installed() == f"{version}+cpu" or install_cpu_build(version, options):
            return None
        say(f"installing torch {version} of pip's own index instead, which brings CUDA: gigabytes")
    return install_plain_build(version, options)


if __name__ == "__main__":
    main()
