"""The engine, and one image of the template's defaults for all tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rendering import git, make_repository, render

from .engine import Engine

# A part of every secret that is planted, so that one search finds any of them.
CANARY = f"canary{secrets.token_hex(8)}"
# In a source file of the project: what a search of the image must find.
IN_SOURCES = f"planted{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Built:
    """An image, the project that it was built from, and what its build printed."""

    image: str
    project: Path
    log: str
    commit: str

    @property
    def by_commit(self) -> str:
        return f"{self.image}-{self.commit[:12]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test time for the image, whoever is the first to need it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Return the engine that docker/smoke.sh names."""
    if "IMAGE_DOCKER" not in os.environ:
        pytest.skip("needs a Docker engine: run `bash docker/smoke.sh`")
    return Engine(
        os.environ["IMAGE_DOCKER"],
        os.environ["IMAGE_BASE"],
        os.environ["IMAGE_BASE_COMPILER"],
        os.environ["IMAGE_NETWORK"],
        Path(os.environ["IMAGE_WHEELS"]),
    )


@pytest.fixture(scope="session")
def build_secrets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return settings of `make docker` that bear secrets, and keep pip away from any index."""
    folder = tmp_path_factory.mktemp("secrets")
    pip_conf, ca = folder / "pip.conf", folder / "ca.pem"
    pip_conf.write_text(
        "[global]\nno-index = true\nretries = 0\n"
        f"find-links = https://builder:{CANARY}-pip@localhost:9/\n"
    )
    ca.write_text(f"# {CANARY}-ca\n")
    index = f"https://builder:{CANARY}-index@localhost:9/simple"
    return [f"PIP_CONF={pip_conf}", f"CA={ca}", f"TORCH_INDEX={index}"]


@pytest.fixture(scope="session")
def built(
    engine: Engine, build_secrets: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    """Build the image of a render with the template's defaults, as its user does."""
    project = render(tmp_path_factory.mktemp("image"), hooks=True)
    make_repository(project)
    # Git does not know of these files, and the image must not either.
    exclude = project / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text(".env\nid_rsa\n")
    for place in (".env", "id_rsa", "src/.env", "configs/.env", "runs/run/config.yaml"):
        (project / place).parent.mkdir(parents=True, exist_ok=True)
        (project / place).write_text(f"{CANARY}-file\n")
    remote = f"https://me:{CANARY}-remote@example.org/lab/my-project.git"
    git(project, "remote", "add", "origin", remote)
    image = f"smoke-{secrets.token_hex(4)}:test"
    log = engine.make(project, "docker", f"IMAGE={image}", *build_secrets)
    built = Built(image, project, log, git(project, "rev-parse", "HEAD").strip())
    yield built
    engine("rmi", "--force", image, built.by_commit)
