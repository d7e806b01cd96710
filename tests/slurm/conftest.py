"""One cluster of three nodes for all tests here; each pytest process has its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import render

from . import jobs


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: needs SLURM, and root to start a cluster of it")


@pytest.fixture(scope="session")
def can_start() -> None:
    """Skip what needs a cluster where none can be started; in CI fail."""
    reason = jobs.missing()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def cluster(can_start: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[jobs.Cluster]:
    """Return a cluster of three nodes with two made-up GPUs each."""
    cluster = jobs.Cluster(tmp_path_factory.mktemp("cluster") / "slurm")
    done = cluster.control("up", "3", "2")
    assert done.returncode == 0, done.stderr
    yield cluster
    done = cluster.control("down")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def on_cluster(cluster: jobs.Cluster, tmp_path_factory: pytest.TempPathFactory) -> jobs.Project:
    """Return a rendered project, in a folder whose name a shell could misread."""
    folder = render(tmp_path_factory.mktemp("it's $(touch canary) `touch canary`; x"))
    Path(folder, "subject.py").write_text(jobs.SUBJECT, encoding="utf-8")
    return jobs.Project(cluster, folder)


@pytest.fixture(autouse=True)
def _no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a test's jobs with it, so that one that fails does not hold up the others."""
    yield
    if "cluster" in request.fixturenames:
        cluster: jobs.Cluster = request.getfixturevalue("cluster")
        cluster.slurm("scancel", "--me")
