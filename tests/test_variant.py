"""Which variant of torch a project installs, and that it stays until it is changed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from rendering import ran, render

# In place of Python: it makes an environment of itself, and records what it is to install.
PYTHON = """#!/bin/sh
case "$*" in
"-c "*) ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip "*) printf '%s\n' "$0 in $PWD" >> "${0%/*}/../installed" ;;
*" which") echo "$MACHINE" ;;
*) echo "$*" >> "$CALLS"; exit "$CODE" ;;
esac
"""

# The template's Makefile sets VARIANT for what it runs.
PLAIN = {"PATH": "/usr/bin:/bin"}
SAYS = "installs torch and the packages of the locks, which takes minutes the first time\n"


@dataclass
class Maker:
    """A project, and what stands for its Python."""

    project: Path
    python: Path

    def setup(self, *words: str, machine: str = "cpu", code: int = 0) -> tuple[list[str], str]:
        """Run what every command runs first; return the variants installed and the output."""
        calls = self.project / "calls"
        calls.write_text("")
        done = subprocess.run(
            # `true` installs the other packages.
            ["make", "--silent", "setup", "install=true", *words],
            cwd=self.project,
            env=PLAIN
            | {"PYTHON": str(self.python), "CALLS": str(calls)}
            | {"MACHINE": machine, "CODE": str(code)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert (done.returncode == 0) == (code == 0), done.stderr
        start = "requirements/install_torch.py "
        lines = calls.read_text().splitlines()
        assert all(line.startswith(start) for line in lines)
        return [line.removeprefix(start) for line in lines], done.stdout.replace(SAYS, "")

    def dry(self, target: str) -> str:
        """Return the commands of a target, which are not run."""
        command = ["make", "--dry-run", target, f"PYTHON={self.python}"]
        return ran(command, cwd=self.project, env=PLAIN).stdout


@pytest.fixture
def maker(project: Path, tmp_path: Path) -> Maker:
    return make(project, tmp_path)


def make(project: Path, folder: Path) -> Maker:
    copy = folder / "copy"
    shutil.copytree(project, copy)
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return Maker(copy, python)


def test_the_variant_is_chosen_once_and_changed_only_when_asked(maker: Maker) -> None:
    assert maker.setup(machine="cpu") == (["auto"], "")
    assert maker.setup(machine="cuda") == ([], "")
    replaced = "torch for cuda replaces torch for cpu in .venv\n"
    assert maker.setup("VARIANT=cuda") == (["cuda"], replaced)
    assert maker.setup("VARIANT=cuda") == ([], "")
    # As lint, test, train and wandb do, on a machine without a driver.
    assert maker.setup(machine="cpu") == ([], "")
    with (maker.project / "requirements" / "cpu.txt").open("a") as lock:
        lock.write("# changed\n")
    assert maker.setup(machine="cpu") == (["cuda"], "")
    assert "build_image.py 'my-project:0.1.0-cuda' 'cuda'" in maker.dry("docker")


def test_an_installation_that_failed_keeps_its_variant(maker: Maker) -> None:
    assert maker.setup("VARIANT=cu126", code=1)[0] == ["cu126"]
    assert maker.setup() == (["cu126"], "")
    assert "--trainer.accelerator cpu --trainer.devices 2" in maker.dry("train")
    assert "build_image.py 'my-project:0.1.0-cu126' 'cu126'" in maker.dry("docker")


def test_the_template_s_answer_counts_where_nothing_was_asked(tmp_path: Path) -> None:
    maker = make(render(tmp_path, {"torch_variant": "cuda"}), tmp_path)
    assert maker.setup(machine="cpu")[0] == ["cuda"]
    assert maker.setup("VARIANT=cpu")[0] == ["cpu"]
    assert maker.setup() == ([], "")


def test_each_copy_of_a_project_is_installed_into_its_own_environment(
    maker: Maker, tmp_path: Path
) -> None:
    """Also in folders whose names a shell could misread, and after one was moved."""
    names = ["it's $(touch canary) `touch canary`; \"x", "moved $$HOME", "copied"]
    first, moved, copy = (Maker(tmp_path / name, maker.python) for name in names)
    maker.project.rename(first.project)
    first.setup()
    shutil.copytree(first.project, copy.project)
    for maker in (first, copy):
        maker.setup()
        maker.setup()
    first.project.rename(moved.project)
    moved.setup()
    line = ".venv/bin/python in {}\n"
    installed = [maker.project / ".venv" / "installed" for maker in (moved, copy)]
    places = [[first.project, moved.project], [first.project, copy.project]]
    for path, folders in zip(installed, places, strict=True):
        assert path.read_text() == "".join(line.format(folder) for folder in folders)
    assert not [*tmp_path.rglob("canary")]


def test_an_unknown_variant_is_one_line_and_help_names_the_one_for_gpus(maker: Maker) -> None:
    done = ran(["make", "setup", "VARIANT=gpu"], cwd=maker.project, env=PLAIN)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "VARIANT=gpu is unknown: cpu, cuda, or PyTorch's index of other builds" in done.stderr
    assert not (maker.project / ".venv").exists()
    said = ran(["make"], cwd=maker.project, env=PLAIN)
    assert said.stdout.splitlines()[0].endswith("first make setup VARIANT=cuda")
