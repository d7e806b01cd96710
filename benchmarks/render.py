"""Renders the template: once for the bundled trainer, and many times to see how long it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "bench"


def render_project() -> Path:
    """Render the template into build/bench and return the `src` folder of the project."""
    if BUILD.exists():
        shutil.rmtree(BUILD)
    BUILD.mkdir(parents=True)
    _cookiecutter(ROOT, BUILD)
    (source,) = BUILD.glob("*/src")
    return source


def time_render(one_file: bool) -> float:
    """Seconds that cookiecutter takes for the template, or for one of a single file: its floor."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        template = ROOT
        if one_file:
            template = folder / "template"
            project = template / "{{cookiecutter.project_slug}}"
            project.mkdir(parents=True)
            (project / "README.md").write_text("# {{cookiecutter.project_slug}}\n")
            (template / "cookiecutter.json").write_text('{"project_slug": "my-project"}\n')
        output = folder / "output"
        output.mkdir()
        began = time.monotonic()
        _cookiecutter(template, output)
        return time.monotonic() - began


def _cookiecutter(template: Path, output: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        # The user's own configuration would change the answers, and would be written to.
        config = Path(home) / "config.yaml"
        config.write_text(f"cookiecutters_dir: {home}/c\nreplay_dir: {home}/r\n")
        subprocess.run(
            [sys.executable, "-m", "cookiecutter", str(template), "--no-input", "-o", str(output)],
            env={**os.environ, "COOKIECUTTER_CONFIG": str(config)},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=120,
        )
