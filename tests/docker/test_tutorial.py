"""The tutorial's container: `make docker` with the reader's own task, and a fit in it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import tutorial
from rendering import render

from .conftest import Built
from .engine import Engine


def test_the_tutorial_trains_in_its_image(
    engine: Engine, built: Built, build_secrets: list[str], tmp_path: Path
) -> None:
    """Its image shares the environment with `built`."""
    name = f"tutorial-{secrets.token_hex(4)}"
    answers = {"project_slug": name, "package_name": "my_project"}
    project = render(tmp_path, answers, hooks=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").symlink_to(engine.docker)
    environment = dict(word.split("=", 1) for word in build_secrets) | engine.settings(project)
    environment["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    page = project / "docs" / "tutorial.md"
    try:
        assert tutorial.follow(page, project, ("files", "docker"), environment) == 2
        shared = engine.layers(built.image)[:-4]  # the project's own files are in four layers
        assert engine.layers(f"{name}:0.1.0")[:-4] == shared
        assert (project / "runs" / "container" / "last").is_dir()
    finally:
        engine("rmi", "--force", f"{name}:0.1.0", check=False)
