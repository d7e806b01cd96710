"""`make add`: packages go into pyproject.toml and the locks, torchvision with torch."""

from __future__ import annotations

import platform
import sys
import tomllib
from pathlib import Path

import add
import install_torch
import lock
import pytest
from package_index import serve, write_wheel
from rendering import TEMPLATE

VERSIONS = {"torch": "2.13.0", "torchvision": "0.28.0", "timm": "1.0.31", "numpy": "2.4.6"}
TAG = f"cp3{sys.version_info[1]}-cp3{sys.version_info[1]}"


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project's requirements/, in which the CPU build of torch is installed and locked."""
    folder = tmp_path / "project" / "requirements"
    folder.mkdir(parents=True)
    (folder / "cpu.in").write_text("torch==2.13.0\n")
    (folder / "dev.in").write_text("-c cpu.txt\n")
    text = (TEMPLATE / "pyproject.toml").read_text(encoding="utf-8")
    start = text.index("dependencies = [")
    (folder.parent / "pyproject.toml").write_text(
        "[project]\n" + text[start : text.index("[pro", start)]
    )
    monkeypatch.setattr(lock, "HERE", folder)
    monkeypatch.setattr(install_torch, "HERE", folder)
    monkeypatch.setattr(add, "PYPROJECT", folder.parent / "pyproject.toml")
    monkeypatch.setattr(lock, "PYTORCH_INDEX", "http://127.0.0.1:9/")
    monkeypatch.setattr(lock, "resolve", resolve)
    monkeypatch.setattr(add, "installed", lambda name: f"{VERSIONS[name]}+cpu")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    entry = f"{cpu_line('torch', '2.13.0')} \\\n    --hash=sha256:{'0' * 64}"
    lock.write("torch-cpu.txt", {"torch": [entry]}, "of a test", "cpu.in")
    return folder


def cpu_line(name: str, version: str) -> str:
    python = f"3.{sys.version_info[1]}"
    return install_torch.cpu_line(name, version, python, platform.machine())


def resolve(source: str, _former: str) -> lock.Locked:
    """Return what uv would: timm needs torchvision."""
    names = {"torch"} if source != "dev.in" else set()
    if source == "cpu.in":
        names |= {add.name_of(line) for line in lock.dependencies().splitlines()} & set(VERSIONS)
    if "timm" in names:
        names.add("torchvision")
    return {n: [f"{n}=={VERSIONS[n]} \\\n    --hash=sha256:{'1' * 64}"] for n in sorted(names)}


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.parent.rglob("*") if path.is_file()}


def names(lock_file: Path) -> list[str]:
    return list(lock.entries(lock_file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("written", ["['a>=1', \"b[c]\"]", "[\n  'a', # x\n  'b[c]'  # y\n]", "[]"])
def test_dependencies_may_be_on_one_line_and_lack_the_last_comma(written: str) -> None:
    text = add.with_dependencies(f"dependencies = {written}\nx = 1\n", ["a>=2", "z"])
    kept = ["b[c]"] * ("b" in written)
    assert tomllib.loads(text) == {"dependencies": [*kept, "a>=2", "z"], "x": 1}
    with pytest.raises(SystemExit, match=r"add\.py: pyproject\.toml: write each of `dependencies`"):
        add.with_dependencies("dependencies = [\n  'a']\n", ["z"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has one build")
def test_torchvision_is_locked_with_the_cpu_build_of_torch_s_index(
    requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels" / "cpu" / "torchvision"
    tag = f"{TAG}-manylinux_2_28_{platform.machine()}"
    digest = write_wheel(wheels, "torchvision", "0.28.0+cpu", tag)
    write_wheel(wheels, "torchvision", "0.27.0+cpu", tag)
    monkeypatch.setenv("PACKAGE", "timm>=1")
    with serve(tmp_path / "wheels") as (address, _asked):
        monkeypatch.setenv("TORCH_INDEX", f"{address}/cpu")
        add.main()
    project = tomllib.loads((requirements.parent / "pyproject.toml").read_text())["project"]
    assert project["dependencies"][-2:] == ["jinja2>=3.1", "timm>=1"]
    assert names(requirements / "torch.txt") == ["torch", "torchvision"]
    assert names(requirements / "cpu.txt") == ["numpy", "timm"]
    text = (requirements / "torch-cpu.txt").read_text()
    assert [line for line in text.splitlines() if "torchvision" in line or digest in line] == [
        f"{cpu_line('torchvision', '0.28.0')} \\",
        f"    --hash=sha256:{digest}",
    ]
    assert "\ntorch==2.13.0+cpu " in text


def test_where_no_index_has_its_cpu_build_nothing_is_changed(
    requirements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(requirements)
    monkeypatch.setenv("PACKAGE", "timm")
    with pytest.raises(SystemExit) as raised:
        add.main()
    said = str(raised.value)
    assert said.startswith("add.py: torch-cpu.txt has no hash of torchvision for Python 3.")
    assert "nothing is changed. An index that has it: TORCH_INDEX=URL; " in said
    assert "\n" not in said
    # Locks that were not there before are made by `make setup` only from what is in .in files.
    assert {name: text for name, text in contents(requirements).items() if name in before} == before


def test_beside_torch_with_cuda_the_build_of_pip_s_index_is_right(
    requirements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add, "installed", VERSIONS.__getitem__)
    monkeypatch.setenv("PACKAGE", "timm")
    add.main()
    assert names(requirements / "torch.txt") == ["torch", "torchvision"]
    monkeypatch.setenv("PACKAGE", "TIMM==1.0.31 my_lib[extra]~=1.0")  # the same again
    add.main()
    text = (requirements.parent / "pyproject.toml").read_text()
    added = ["jinja2>=3.1", "TIMM==1.0.31", "my_lib[extra]~=1.0"]
    assert tomllib.loads(text)["project"]["dependencies"][-3:] == added


@pytest.mark.parametrize("value", ["", "torch==2.12", "git+https://example.org/x", 'a"b', "--pre"])
def test_what_cannot_be_locked_is_refused_in_a_line(
    requirements: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    before = contents(requirements)
    monkeypatch.setenv("PACKAGE", value)
    with pytest.raises(SystemExit, match=r"^add\.py: PACKAGE=.*give names, such as make add"):
        add.main()
    assert contents(requirements) == before
