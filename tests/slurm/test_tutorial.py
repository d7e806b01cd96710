"""The tutorial's job on two nodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tutorial

from .jobs import Project, _environment, read_metrics, value

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]


def test_the_tutorial_trains_on_two_nodes(on_cluster: Project, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    left = shutil.ignore_patterns("runs", "slurm-*.out")
    shutil.copytree(on_cluster.folder, folder, ignore=left)
    environment = _environment() | {"PYTHONPATH": str(folder / "src")}
    environment["SLURM_CONF"] = on_cluster.cluster.slurm("printenv", "SLURM_CONF")
    page = folder / "docs" / "tutorial.md"
    assert tutorial.follow(page, folder, ("files", "slurm"), environment) == 2
    (run,) = folder.glob("runs/job-*")
    (attempt,) = json.loads((run / "run.json").read_text())["attempts"]
    assert (attempt["layout"]["num_nodes"], attempt["layout"]["world_size"]) == (2, 2)
    assert value(read_metrics(run), "val_error") < 0.1
