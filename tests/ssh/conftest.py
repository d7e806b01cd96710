"""One set of hosts for all tests here; each pytest process has its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import render
from slurm.jobs import SUBJECT

from . import hosts, runs


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ssh: needs sshd, and root for network namespaces")


@pytest.fixture(scope="session")
def can_start() -> None:
    """Skip what needs hosts where none can be started; in CI fail."""
    reason = hosts.missing()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def project(can_start: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[runs.Project]:
    """Return a project on three hosts, in a folder whose name a shell could misread."""
    answers = {"other_launchers": "ssh", "gpus_per_node": "0"}
    folder = render(tmp_path_factory.mktemp("it's $(touch canary) `touch canary`; x"), answers)
    Path(folder, "subject.py").write_text(SUBJECT, encoding="utf-8")
    network = hosts.Hosts(tmp_path_factory.mktemp("hosts") / "ssh", folder)
    try:
        network.up()
        yield runs.Project(network, folder)
    finally:
        network.down()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no process is left on a host, and nothing that a shell has misread."""
    yield
    if "project" in request.fixturenames:
        project: runs.Project = request.getfixturevalue("project")
        left = {name: project.left_on(name) for name in hosts.NAMES}
        assert not any(left.values()), left
        assert not list(project.folder.parent.rglob("canary"))
        assert not list(project.folder.glob("runs/.*"))
