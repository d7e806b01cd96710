"""Where install_torch.py takes torch from, on indexes of this machine with wheels of a kilobyte."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from package_index import serve, write_wheel
from rendering import TEMPLATE, ran

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has one build")

VERSION = "2.13.0"
CPU = f"{VERSION}+cpu"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYTORCH = "https://download.pytorch.org/whl/"
CPU_TAG = f"cp{PYTHON.replace('.', '')}-cp{PYTHON.replace('.', '')}-linux_{platform.machine()}"


@dataclass
class Place:
    """A rendered requirements/ with locks of small wheels, and three indexes that may have them."""

    requirements: Path
    wheels: Path
    address: str
    asked: list[str]
    python: Path
    variables: dict[str, str] = field(default_factory=dict)

    def offer(self, index: str, version: str, *, name: str = "torch") -> str:
        """Put a wheel into an index, and return its hash."""
        tag = CPU_TAG if "+" in version else "py3-none-any"
        return write_wheel(self.wheels / index / name, name, version, tag)

    def lock(self, file: str, requirement: str, digest: str) -> None:
        (self.requirements / file).write_text(f"{requirement} \\\n    --hash=sha256:{digest}\n")

    def lock_more(self, file: str, requirement: str, digest: str) -> None:
        before = (self.requirements / file).read_text()
        self.lock(file, requirement, digest)
        lock = self.requirements / file
        lock.write_text(before + lock.read_text())

    def change(self, before: str, after: str) -> None:
        script = self.requirements / "install_torch.py"
        text = script.read_text(encoding="utf-8")
        assert text.count(before) == 1
        script.write_text(text.replace(before, after), encoding="utf-8")

    def install(self, kind: str = "cpu") -> tuple[int, list[str]]:
        """Run the script; return its exit code and the lines that it printed."""
        # Nothing of this machine's pip, but for certificates.
        ours = {k: v for k, v in os.environ.items() if k == "PIP_CERT" or not k.startswith("PIP_")}
        ours.pop("TORCH_INDEX", None)
        ours |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{self.address}/pip"}
        variables = ours | {"PIP_NO_CACHE_DIR": "1"} | self.variables
        done = ran([self.python, self.requirements / "install_torch.py", kind], env=variables)
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert all(line.startswith("install_torch.py: ") for line in lines), done.stderr
        return done.returncode, [line.removeprefix("install_torch.py: ") for line in lines]

    def installed(self, name: str = "torch") -> str:
        code = f"import {name}; print({name}.__version__)"
        return ran([self.python, "-c", code]).stdout.strip()


@pytest.fixture
def place(environment: Path, tmp_path: Path) -> Iterator[Place]:
    """Return a place where pip's index has torch's plain build, and no index has one for CPUs."""
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    shutil.copy(TEMPLATE / "requirements" / "install_torch.py", requirements)
    with serve(tmp_path / "wheels") as (address, asked):
        place = Place(requirements, tmp_path / "wheels", address, asked, environment)
        place.lock("torch.txt", f"torch=={VERSION}", place.offer("pip", VERSION))
        place.lock("cuda.txt", "cudalib==13.0", place.offer("pip", "13.0", name="cudalib"))
        place.lock("torch-cpu.txt", cpu_requirement(), place.offer("elsewhere", CPU))
        place.change(PYTORCH, f"{address}/pytorch-")
        # Whatever driver this machine has.
        place.change("/proc/driver/nvidia/version", str(tmp_path / "driver"))
        yield place
    # Removing is what takes pip a second: it knows two names only.
    for left in environment.parent.parent.glob("lib/*/site-packages/*"):
        if left.name.startswith(("torch", "cudalib", "smalllib")):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def cpu_requirement(name: str = "torch", version: str = CPU) -> str:
    return (
        f"{name}=={version} ; python_version == '{PYTHON}' and sys_platform == 'linux' "
        f"and platform_machine == '{platform.machine()}'"
    )


def asked_indexes(place: Place) -> set[str]:
    return {path.split("/")[1] for path in place.asked}


BRINGS_CUDA = f"installing torch {VERSION} of pip's own index instead, which brings CUDA: gigabytes"
OF_PIP = f"what pip is configured with: no torch {CPU} for this Python, or no answer"


def test_the_cpu_build_that_pip_knows_is_taken(place: Place) -> None:
    folder = place.wheels / "links"
    place.lock("torch-cpu.txt", cpu_requirement(), write_wheel(folder, "torch", CPU, CPU_TAG))
    place.variables["PIP_FIND_LINKS"] = str(folder)
    assert place.install() == (0, [])
    assert place.installed() == CPU
    assert place.installed("cudalib") == ""
    assert asked_indexes(place) == {"pip"}
    # What is there stays, and nobody is asked.
    place.asked.clear()
    assert place.install() == (0, [])
    assert place.asked == []


def test_an_index_that_the_user_names_is_asked_first_and_alone(place: Place) -> None:
    for index in ("mine", "pip", "pytorch-cpu"):
        place.lock("torch-cpu.txt", cpu_requirement(), place.offer(index, CPU))
    place.variables["TORCH_INDEX"] = f"{place.address}/mine"
    place.variables["PIP_EXTRA_INDEX_URL"] = f"{place.address}/extra"
    assert place.install() == (0, [])
    assert place.installed() == CPU
    assert asked_indexes(place) == {"mine"}


def test_where_the_named_index_has_none_the_others_are_asked(place: Place) -> None:
    place.offer("mine", f"{VERSION}+cu130")
    place.lock("torch-cpu.txt", cpu_requirement(), place.offer("pytorch-cpu", CPU))
    named = place.address.replace("://", "://me:canary@") + "/mine"
    place.variables["TORCH_INDEX"] = named
    hidden = place.address.replace("://", "://****@") + "/mine"
    line = f"TORCH_INDEX ({hidden}): no torch {CPU} for this Python, or no answer"
    assert place.install() == (0, [line, OF_PIP])
    assert place.installed() == CPU
    assert asked_indexes(place) == {"mine", "pip", "pytorch-cpu"}


def test_without_a_cpu_build_the_plain_one_is_taken_with_cuda(place: Place) -> None:
    code, lines = place.install()
    of_pytorch = f"{place.address}/pytorch-cpu: no torch {CPU} for this Python, or no answer"
    assert (code, lines) == (0, [OF_PIP, of_pytorch, BRINGS_CUDA])
    assert place.installed() == VERSION
    assert place.installed("cudalib") == "13.0"


def test_an_index_that_refuses_or_never_answers_is_passed_over(place: Place) -> None:
    # Of the whole look, however pip's own timeouts add up; shorter, for a test.
    place.change("LONGEST_LOOK = 30.0", "LONGEST_LOOK = 3.0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}"
        place.change(f"{place.address}/pytorch-", index)
        place.variables["TORCH_INDEX"] = "http://127.0.0.1:9"
        code, lines = place.install()
    assert code == 0
    assert [line.partition(":")[0] for line in lines] == [
        "TORCH_INDEX (http",
        "what pip is configured with",
        "http",
        BRINGS_CUDA.partition(":")[0],
    ]
    assert place.installed() == VERSION


def test_a_cpu_build_with_another_hash_is_not_installed(place: Place) -> None:
    other = write_wheel(place.wheels / "pytorch-cpu" / "torch", "torch", CPU, CPU_TAG)
    place.lock("torch-cpu.txt", cpu_requirement(), other[::-1])
    code, lines = place.install()
    said = f"{place.address}/pytorch-cpu: torch not installed: its hash is not the locked one"
    assert (code, lines) == (0, [OF_PIP, said, BRINGS_CUDA])
    assert place.installed() == VERSION


def test_a_machine_without_a_locked_cpu_build_asks_for_none(place: Place) -> None:
    text = cpu_requirement().replace(f"'{PYTHON}'", "'3.9'")
    place.lock("torch-cpu.txt", text, place.offer("pip", CPU))
    machine = f"Python {PYTHON} on {platform.machine()}"
    line = f"torch-cpu.txt has no hash of torch for {machine} (`make lock` adds it)"
    assert place.install() == (0, [line, BRINGS_CUDA])
    assert place.installed() == VERSION
    assert asked_indexes(place) == {"pip"}


def test_for_gpus_the_plain_build_is_taken_though_pip_knows_one_for_cpus(place: Place) -> None:
    place.lock("torch-cpu.txt", cpu_requirement(), place.offer("pip", CPU))
    assert place.install() == (0, [])
    assert place.installed() == CPU
    assert place.install("cuda") == (0, [])
    assert (place.installed(), place.installed("cudalib")) == (VERSION, "13.0")


def test_a_plain_build_with_another_hash_ends_in_one_line(place: Place) -> None:
    place.lock("torch.txt", f"torch=={VERSION}", "0" * 64)
    code, lines = place.install("cuda")
    said = f"torch {VERSION} could not be installed: its hash is not the locked one"
    assert (code, lines) == (1, [said])
    assert place.installed() == ""


def test_the_newest_cpu_build_is_taken_of_the_first_index_that_answers(place: Place) -> None:
    place.offer("pytorch-cpu", "2.14.0+cpu")
    place.variables["TORCH_INDEX"] = "http://127.0.0.1:9"
    assert place.install("newest") == (0, [])
    assert place.installed() == "2.14.0+cpu"


def add_torchvision(place: Place, *indexes: str) -> None:
    """Lock torchvision too, whose CPU build these indexes have, and pip's the plain one."""
    plain = place.offer("pip", "0.28.0", name="torchvision")
    place.lock_more("torch.txt", "torchvision==0.28.0", plain)
    for index in ("elsewhere", *indexes):
        digest = place.offer(index, "0.28.0+cpu", name="torchvision")
    place.lock_more("torch-cpu.txt", cpu_requirement("torchvision", "0.28.0+cpu"), digest)


def test_torchvision_comes_from_where_torch_comes_from(place: Place) -> None:
    place.lock("torch-cpu.txt", cpu_requirement(), place.offer("pytorch-cpu", CPU))
    # pip's own has torch's CPU build too, but not that of torchvision.
    place.offer("pip", CPU)
    add_torchvision(place, "pytorch-cpu")
    said = "what pip is configured with: no torchvision 0.28.0+cpu for this Python, or no answer"
    said += f"; it has torch {CPU}"
    assert place.install() == (0, [said])
    assert (place.installed(), place.installed("torchvision")) == (CPU, "0.28.0+cpu")
    assert place.install("cuda") == (0, [])
    assert (place.installed(), place.installed("torchvision")) == (VERSION, "0.28.0")


def test_beside_an_installed_torch_only_torchvision_is_looked_for(place: Place) -> None:
    place.lock("torch-cpu.txt", cpu_requirement(), place.offer("pytorch-cpu", CPU))
    assert place.install() == (0, [OF_PIP])
    shutil.rmtree(place.wheels / "pytorch-cpu")
    add_torchvision(place, "mine")
    place.variables["TORCH_INDEX"] = f"{place.address}/mine"
    assert place.install() == (0, [])
    assert (place.installed(), place.installed("torchvision")) == (CPU, "0.28.0+cpu")


def test_another_build_of_pytorch_s_is_taken_from_its_index(place: Place) -> None:
    place.lock("cpu.txt", "smalllib==1.0", place.offer("pip", "1.0", name="smalllib"))
    add_torchvision(place)
    place.offer("pytorch-cu126", f"{VERSION}+cu126")
    place.offer("pytorch-cu126", "0.28.0+cu126", name="torchvision")
    reason = f"no torch {VERSION}+cu126, no torchvision 0.28.0+cu126 for this Python, or no answer"
    said = f"what pip is configured with: {reason}"
    assert place.install("cu126") == (0, [said])
    assert (place.installed(), place.installed("torchvision")) == (
        *(f"{VERSION}+cu126", "0.28.0+cu126"),
    )
    assert place.installed("smalllib") == "1.0"
    place.offer("pytorch-rocm6.4", "2.12.1+rocm6.4")
    code, lines = place.install("rocm6.4")
    assert code == 1
    assert lines[-2].endswith("no answer; it has torch 2.12.1+rocm6.4")
    problem = f"torch=={VERSION}+rocm6.4 torchvision==0.28.0+rocm6.4 could not be installed"
    advice = "another version of torch: write it into requirements/cpu.in, and `make lock`"
    assert lines[-1] == f"{problem}; {advice}"
    assert place.installed() == f"{VERSION}+cu126"


def which(place: Place) -> str:
    script = place.requirements / "install_torch.py"
    done = subprocess.run(
        [place.python, script, "which"],
        env={"PATH": "/nonexistent"},  # nvidia-smi is not found
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() + done.stderr


def test_the_driver_of_this_machine_decides(place: Place, tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (x@y)\n"
    place.variables["PATH"] = "/nonexistent"
    place.lock("torch-cpu.txt", cpu_requirement(), place.offer("pip", CPU))
    assert which(place) == "cpu"
    assert place.install("auto") == (
        0,
        [
            "no NVIDIA driver on this machine: torch for CPUs. For GPUs of other machines, "
            "as in a cluster: make setup VARIANT=cuda"
        ],
    )
    assert place.installed() == CPU
    old = "NVIDIA driver {} is too old for CUDA 13 (580 or newer): {}"
    cu126 = f"make setup VARIANT=cu126 ({place.address}/pytorch-cu126)"
    for version, remedy in {"550.54.15": cu126, "470.82.01": "update it"}.items():
        driver.write_text(line.format(version))
        assert which(place) == "cpu"
        said = [old.format(version, remedy), "torch for CPUs"]
        assert place.install("auto") == (0, said)
        assert place.install("cpu") == (0, [])
    driver.write_text(line.format("580.65.06"))
    assert which(place) == "cuda"
    said = ["NVIDIA driver 580.65.06: torch for CUDA. For CPUs: make setup VARIANT=cpu"]
    assert place.install("auto") == (0, said)
    assert place.installed() == VERSION
    driver.write_text(line.format("550.54.15"))
    assert place.install("cuda") == (0, [old.format("550.54.15", cu126)])
