"""Keeps renders away from the user's own settings, and makes one render for all tests."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import ROOT, TEMPLATE, make_repository, render

pytest_plugins = ["trainer.file_times", "trainer.weekly"]
# Tests of the trainer run in the environment of a rendered project.
collect_ignore = ["trainer"]
# Scripts that are imported from the template's folder would leave files there and in renders.
sys.dont_write_bytecode = True
# Other commands do not prevent it, and cookiecutter would copy what they have left.
for folder in list(TEMPLATE.rglob("__pycache__")):
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_finish() -> None:
    """What is collected is no garbage: a search for it leaves it out."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give cookiecutter and git a home of their own: no settings come in, no replays go out."""
    home = tmp_path_factory.mktemp("home")
    # Another user's checkout, such as a container's mount, is read too.
    (home / ".gitconfig").write_text(f"[safe]\ndirectory = {ROOT}\n", encoding="utf-8")
    settings = home / "cookiecutter.yaml"
    folders = {"cookiecutters_dir": str(home / "templates"), "replay_dir": str(home / "replay")}
    settings.write_text(json.dumps(folders), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # Nor do the flags of the make that runs these tests reach those that they run.
        for name in [name for name in os.environ if name.startswith(("GIT_", "MAKE", "MFLAGS"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("COOKIECUTTER_CONFIG", str(settings))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        yield


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a render with the template's defaults, hooks included, with its first commit."""
    project = render(tmp_path_factory.mktemp("default"), hooks=True)
    make_repository(project)
    return project


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with pip alone."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=600)
    return folder / "bin" / "python"
