"""Locks are installed by uv where it is on PATH, and by pip where not; both check hashes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from linters import TOOLS
from package_index import write_wheel
from rendering import ran

NAME = "lockedlib"


@pytest.fixture
def wheels(environment: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a folder with a wheel, and beside it lock.txt; at the end nothing is installed."""
    digest = write_wheel(tmp_path / "wheels", NAME, "1.0")
    (tmp_path / "lock.txt").write_text(f"{NAME}==1.0 \\\n    --hash=sha256:{digest}\n")
    yield tmp_path / "wheels"
    for left in environment.parent.parent.glob(f"lib/*/site-packages/{NAME}*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def install(project: Path, environment: Path, wheels: Path, path: Path, **variables: str) -> str:
    """Run the Makefile's own way to install a lock; return who has installed it, or nothing."""
    venv = environment.parent.parent
    rule = f"install-lock: ; @$(call install,-r {wheels.parent / 'lock.txt'})"
    done = ran(
        ["make", "--eval", rule, "install-lock", f"VENV={venv}"],
        cwd=project,
        env=os.environ
        | {"PATH": f"{path}:/usr/bin:/bin", "PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}
        | {"UV_FIND_LINKS": str(wheels), "UV_NO_INDEX": "1", "UV_NO_CONFIG": "1"}
        | variables,
    )
    installers = [
        file.read_text().strip() for file in venv.glob(f"lib/*/site-packages/{NAME}-*/INSTALLER")
    ]
    assert (done.returncode == 0) == bool(installers), done.stderr
    return "".join(installers)


@pytest.fixture
def with_uv(tmp_path: Path) -> Path:
    """Return a folder for PATH that has uv and nothing else of this environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uv").symlink_to(TOOLS / "uv")
    return folder


def test_uv_installs_where_it_is_there(
    project: Path, environment: Path, wheels: Path, with_uv: Path
) -> None:
    assert install(project, environment, wheels, with_uv) == "uv"


def test_pip_installs_where_there_is_no_uv(
    project: Path, environment: Path, wheels: Path, tmp_path: Path
) -> None:
    assert install(project, environment, wheels, tmp_path / "empty") == "pip"


def test_pip_installs_what_only_its_settings_find(
    project: Path, environment: Path, wheels: Path, with_uv: Path, tmp_path: Path
) -> None:
    nothing = str(tmp_path / "nothing")
    assert install(project, environment, wheels, with_uv, UV_FIND_LINKS=nothing) == "pip"


def test_neither_installs_what_has_another_hash(
    project: Path, environment: Path, wheels: Path, with_uv: Path
) -> None:
    (wheels.parent / "lock.txt").write_text(f"{NAME}==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    assert install(project, environment, wheels, with_uv) == ""
