"""What an image is labeled and tagged with; tests/docker looks at those of a real one."""

from __future__ import annotations

import shutil
from pathlib import Path

import build_image
import pytest
from rendering import DEFAULTS, git

BASE = "python:3.11.14-slim-bookworm"
DIGEST = "sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d"


@pytest.fixture
def repository(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of a render, which is looked at in place of the template's folder."""
    copy = tmp_path / "project"
    shutil.copytree(project, copy)
    monkeypatch.setattr(build_image, "PROJECT", copy)
    for name in ("BASE_IMAGE", "ENGINES", "PIP_CONF", "CA", "TORCH_INDEX", "DOCKER"):
        monkeypatch.delenv(name, raising=False)
    return copy


def options(command: list[str], name: str) -> list[str]:
    return [word.partition("=")[2] for word in command if word.startswith(f"--{name}=")]


def test_labels_name_the_source_the_license_and_the_base(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://me:canary@example.org/lab/train.git")
    command = build_image.command("my-project:0.1.0", "cpu")
    oci = "org.opencontainers.image"
    assert options(command, "label") == [
        f"{oci}.description={DEFAULTS['description']}",
        f"{oci}.licenses=MIT",
        f"{oci}.source=https://example.org/lab/train",
        f"{oci}.base.name={BASE}",
        f"{oci}.base.digest={DIGEST}",
    ]
    assert "canary" not in " ".join(command)


def test_what_is_not_known_is_not_labeled(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASE_IMAGE", "mine:1")
    labels = options(build_image.command("my-project:0.1.0", "cpu"), "label")
    assert [
        label.partition("=")[0].removeprefix("org.opencontainers.image.") for label in labels
    ] == ["description", "licenses", "base.name"]
    assert labels[-1] == "org.opencontainers.image.base.name=mine:1"


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@example.org:lab/train.git", "https://example.org/lab/train"),
        ("ssh://git@example.org:2222/lab/train.git/", "https://example.org/lab/train"),
        ("https://token@example.org:8443/lab/train", "https://example.org/lab/train"),
        ("/srv/git/train.git", ""),
        ("file:///srv/git/train.git", ""),
        ("../train", ""),
        ("", ""),
    ],
)
def test_the_source_is_a_web_address_without_secrets(remote: str, address: str) -> None:
    assert build_image.source(remote) == address


def test_a_second_tag_names_the_commit_of_a_clean_tree(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    image = "registry:5000/my-project:0.1.0-cuda"
    command = build_image.command(image, "cuda")
    assert options(command, "tag") == [image, f"{image}-{commit[:12]}"]
    assert {"VARIANT=cuda", f"COMMIT={commit}"} <= set(options(command, "build-arg"))
    untagged = "registry:5000/my-project"
    assert build_image.tags(untagged, commit) == [untagged, f"{untagged}:{commit[:12]}"]
    (repository / "README.md").write_text("changed\n")
    command = build_image.command("my-project:0.1.0", "cpu")
    assert options(command, "tag") == ["my-project:0.1.0"]
    assert f"COMMIT={commit}-dirty" in options(command, "build-arg")


def test_secrets_are_files_and_variables_and_never_words(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_CONF", "CA"):
        monkeypatch.setenv(name, f"/secrets/{name}")
    monkeypatch.setenv("TORCH_INDEX", "https://me:canary@example.org/simple")
    command = build_image.command("x:y", "cpu")
    assert options(command, "secret") == [
        "id=pip_conf,src=/secrets/PIP_CONF",
        "id=ca,src=/secrets/CA",
        "id=torch_index,env=TORCH_INDEX",
    ]
    assert "canary" not in " ".join(command)
