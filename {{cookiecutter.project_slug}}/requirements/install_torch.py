"""Install torch into the environment of the Python that runs this, checked by hash.

usage: python install_torch.py VARIANT [OPTION OF PIP …]
       python install_torch.py which

cpu      the CPU build of torch-cpu.txt, from the first that has it: TORCH_INDEX (environment), what
         pip is configured with, PyTorch's own index. Where none has it, and on macOS, torch.txt's
         build from pip's index, which on Linux brings CUDA and is larger
cuda     torch.txt's build, with CUDA's libraries (cuda.txt)
auto     cuda if this machine has an NVIDIA driver for it, else cpu; `which` prints this choice
cu126 …  PyTorch's build of this name (rocm6.4, xpu, …) from the same places, with its libraries;
         no lock has them, so without hashes
newest   not locked, so without hashes: the newest CPU build of TORCH_INDEX or of PyTorch's own
         index; where neither can be reached, nothing

torchvision and torchaudio, if torch.txt has them, are installed with torch, from the same place.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).resolve().parent
# PyTorch has one index for each variant.
PYTORCH_INDEX = "https://download.pytorch.org/whl/"
# Their builds depend on torch's: all of them come from one place.
FAMILY = ("torch", "torchvision", "torchaudio")
# The oldest driver for the CUDA of torch.txt, the older CUDA that PyTorch still builds for, and the
# oldest driver for that: https://docs.nvidia.com/cuda/cuda-toolkit-release-notes
CUDA_DRIVER, OLDER_CUDA, OLDER_CUDA_DRIVER = 580, "cu126", 525
DRIVER = Path("/proc/driver/nvidia/version")
# An index that does not answer is passed over: how pip looks, and for how many seconds at most.
LOOKING = {"PIP_RETRIES": "0", "PIP_TIMEOUT": "10"}
LONGEST_LOOK = 30.0
# What a lock has are wheels, with their hashes and all that they need.
LOCKED = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
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


def named_sources(variant: str) -> list[Source]:
    """Return the user's index where one is given, and PyTorch's."""
    given = os.environ.get("TORCH_INDEX", "")
    mine = [Source(f"TORCH_INDEX ({hidden(given)})", given)] if given else []
    return [*mine, Source(PYTORCH_INDEX + variant, PYTORCH_INDEX + variant)]


def hidden(address: str) -> str:
    """Return an address without its user and password."""
    return re.sub("://[^/]*@", "://****@", address)


def cpu_line(name: str, version: str, python: str, machine: str) -> str:
    """Return how torch-cpu.txt asks for the CPU build of a Python and a machine."""
    return (
        f"{name}=={version}+cpu ; python_version == '{python}' and sys_platform == 'linux' "
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


def driver() -> str:
    """Return the version of NVIDIA's driver on this machine, such as 580.65.06, or nothing."""
    try:
        text = DRIVER.read_text(encoding="utf-8")
    except OSError:  # WSL has a driver, but not this file
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LONGEST_LOOK, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        text = done.stdout
    found = re.search(r"\b\d{3,}(\.\d+)+", text)
    return found[0] if found else ""


def is_old(version: str, oldest: int = CUDA_DRIVER) -> bool:
    """Return whether a driver is older than what CUDA needs."""
    return int(version.partition(".")[0]) < oldest


def choose(version: str) -> tuple[str, str]:
    """Return the variant for a machine with this driver, and why."""
    if not version:
        why = "no NVIDIA driver on this machine: torch for CPUs"
        return "cpu", f"{why}. For GPUs of other machines, as in a cluster: make setup VARIANT=cuda"
    if is_old(version):
        return "cpu", "torch for CPUs"
    return "cuda", f"NVIDIA driver {version}: torch for CUDA. For CPUs: make setup VARIANT=cpu"


def tell_old_driver(version: str) -> None:
    """Say which variant a driver can run, where it is too old for that of torch.txt."""
    if version and is_old(version):
        older = f"make setup VARIANT={OLDER_CUDA} ({PYTORCH_INDEX}{OLDER_CUDA})"
        remedy = "update it" if is_old(version, OLDER_CUDA_DRIVER) else older
        say(f"NVIDIA driver {version} is too old for CUDA 13 ({CUDA_DRIVER} or newer): {remedy}")


def versions(source: Source, options: list[str], name: str = "torch") -> list[str]:
    """Return the versions of a package that a source has for this Python; none if it is silent."""
    words = ["index", "versions", name, "--only-binary", ":all:", *options]
    try:
        done = pip(*words, source=source, looking=True)
    except subprocess.TimeoutExpired:
        return []
    found = re.search("^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


def install(*words: str, source: Source = OWN) -> str:
    """Return pip's error, or nothing."""
    done = pip("install", "--quiet", *words, source=source)
    if done.returncode == 0:
        return ""
    if "DO NOT MATCH THE HASHES" in done.stderr:
        return "its hash is not the locked one"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else done.stderr.strip()


def install_locked(lock: str, *options: str, source: Source = OWN) -> str:
    """Install what a lock holds, as wheels whose hashes are checked; return pip's error."""
    return install(*LOCKED, *options, "--requirement", lock, source=source)


def install_builds(variant: str, wanted: dict[str, str], options: list[str], *words: str) -> bool:
    """Install PyTorch's builds of a variant from the first source that has all that is missing.

    Prints why a source was passed over. `words` are what pip is asked for.
    """
    builds = {name: f"{version}+{variant}" for name, version in wanted.items()}
    missing = {name: build for name, build in builds.items() if installed(name) != build}
    sources = named_sources(variant)
    # What the user names goes first.
    sources.insert(len(sources) - 1, OWN)
    for source in sources if missing else []:
        lacks = [f"{n} {b}" for n, b in missing.items() if b not in versions(source, options, n)]
        if lacks:
            say(f"{source.name}: no {', no '.join(lacks)} for this Python, or no answer")
        elif error := install(*words, *options, source=source):
            say(f"{source.name}: {' and '.join(missing)} not installed: {error}")
        else:
            return True
    return not missing


def locked() -> dict[str, str]:
    """Return the versions that torch.txt has, by the names of their packages."""
    text = (HERE / "torch.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\w+)==(\S+)", text, re.MULTILINE))


def unlocked(wanted: dict[str, str]) -> list[str]:
    """Return what has no CPU build for this Python and machine in torch-cpu.txt."""
    python = ".".join(platform.python_version_tuple()[:2])
    lock = (HERE / "torch-cpu.txt").read_text(encoding="utf-8")
    machine = platform.machine()
    return [
        f"torch-cpu.txt has no hash of {name} for Python {python} on {machine}"
        for name, version in wanted.items()
        if cpu_line(name, version, python, machine) not in lock
    ]


def install_cpu_build(wanted: dict[str, str], options: list[str]) -> bool:
    """Install the locked CPU builds, if there is a source of them."""
    missing = {n: v for n, v in wanted.items() if installed(n) != f"{v}+cpu"}
    if lacking := unlocked(missing):
        say(f"{lacking[0]} (`make lock` adds it)")
        return False
    lock = str(HERE / "torch-cpu.txt")
    return install_builds("cpu", wanted, options, *LOCKED, "--requirement", lock)


def install_named_build(variant: str, wanted: dict[str, str], options: list[str]) -> None:
    """Install PyTorch's build of a name, such as cu126, with its libraries."""
    # First what is locked, so that a source of torch is asked only for torch and its libraries.
    lock = ("--requirement", str(HERE / "cpu.txt"), *options)
    error = install("--no-deps", "--require-hashes", *lock)
    pins = [f"{name}=={version}+{variant}" for name, version in wanted.items()]
    if error or not install_builds(variant, wanted, options, *pins):
        raise SystemExit(
            f"install_torch.py: {' '.join(pins)} could not be installed{error and f': {error}'}; "
            "another version of torch: write it into requirements/cpu.in, and `make lock`"
        )


def install_plain_build(wanted: dict[str, str], options: list[str]) -> None:
    """Install the build of pip's own index, and on Linux the libraries of CUDA that it needs."""
    with tempfile.TemporaryDirectory() as folder:
        # `==` would take a CPU build that pip knows, whose hash is not in this lock.
        lock = Path(folder, "torch.txt")
        text = (HERE / "torch.txt").read_text(encoding="utf-8")
        lock.write_text(re.sub(r"(?m)^(\w+)==", r"\1===", text), encoding="utf-8")
        error = install_locked(str(lock), *options)
    if not error and LINUX:
        error = install_locked(str(HERE / "cuda.txt"), *options)
    if error:
        names = " and ".join(map(" ".join, wanted.items()))
        raise SystemExit(f"install_torch.py: {names} could not be installed: {error}")


def install_newest(names: Iterable[str], options: list[str]) -> None:
    """Install the newest CPU builds, where an index of such builds can be reached."""
    for source in named_sources("cpu") if LINUX else []:
        if versions(source, options) and not install("--no-deps", *names, *options, source=source):
            return
    say("no index of CPU builds answers: pip takes torch from its own")


def installed(name: str) -> str:
    """Return the version of a package in this environment, or nothing."""
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Install the build that is asked for."""
    kind, *options = sys.argv[1:] or [""]
    if kind == "which":
        return print(choose(driver())[0])
    if not re.fullmatch(r"cpu|cuda|auto|newest|cu\d+|rocm[\d.]+|xpu", kind):
        raise SystemExit(
            f"install_torch.py: {kind!r} is no variant of torch: cpu, cuda, or PyTorch's index of "
            "other builds, such as cu126 or rocm6.4"
        )
    wanted = locked()
    version = wanted["torch"]
    if kind == "newest":
        return install_newest(wanted, options)
    if kind in ("auto", "cuda"):
        tell_old_driver(driver())
    if kind == "auto":
        kind, why = choose(driver())
        say(why)
    if kind not in ("cpu", "cuda"):
        return install_named_build(kind, wanted, options)
    if kind == "cpu" and LINUX:
        if install_cpu_build(wanted, options):
            return None
        say(f"installing torch {version} of pip's own index instead, which brings CUDA: gigabytes")
    return install_plain_build(wanted, options)


if __name__ == "__main__":
    main()
