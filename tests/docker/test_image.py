"""What is in the image, and what is not."""

from __future__ import annotations

import pytest
from rendering import DEFAULTS

from .conftest import Built
from .engine import Engine

MEGABYTE = 10**6
# Of a project's docs/how-to/container.md, with room for what a new lock may add.
LARGEST = 1500 * MEGABYTE


def test_labels_say_what_it_was_built_from(engine: Engine, built: Built) -> None:
    name, _, digest = engine.base.partition("@")
    lock = (built.project / "requirements" / "torch.txt").read_text(encoding="utf-8")
    torch = next(line for line in lock.splitlines() if line.startswith("torch=="))
    version = torch.removeprefix("torch==").split()[0]
    assert engine.config(built.image)["Labels"] == {
        "org.opencontainers.image.title": "my-project",
        "org.opencontainers.image.version": "0.1.0",
        "org.opencontainers.image.revision": built.commit,
        "org.opencontainers.image.description": DEFAULTS["description"],
        "org.opencontainers.image.licenses": "MIT",
        "org.opencontainers.image.source": "https://example.org/lab/my-project",
        "org.opencontainers.image.base.name": name,
        "torch.version": version,
        "variant": "cpu",
    } | ({"org.opencontainers.image.base.digest": digest} if digest else {})
    said = engine.shell(built.image, "python -c 'import torch; print(torch.__version__)'")
    assert said.strip() == f"{version}+cpu"


def test_a_second_tag_is_the_commit(engine: Engine, built: Built) -> None:
    names = (built.image, built.by_commit)
    first, second = (engine("inspect", "--format", "{{.Id}}", name).stdout for name in names)
    assert first == second


def test_its_user_is_nobody_and_owns_nothing_but_runs(engine: Engine, built: Built) -> None:
    assert engine.config(built.image)["User"] == "10001:10001"
    assert engine.shell(built.image, "id -u; id -g; id -G").split() == ["10001"] * 3
    # Without --read-only, as most people start it.
    script = "for d in / /app /app/src /app/configs /opt/venv; do test -w $d && echo $d; done"
    run = ("run", "--rm", "--network", "none", "--entrypoint", "sh", built.image, "-c")
    assert engine(*run, f"{script}; test -w /app/runs").stdout == ""


def test_there_are_no_build_tools_and_nothing_that_builds_leave(
    engine: Engine, built: Built
) -> None:
    tools = "ar as c++ cc clang cmake curl g++ gcc git ld make ninja nvcc protoc wget"
    assert engine.shell(built.image, f"command -v {tools} || true") == ""
    # The base has a pip of its own where it is Python's official image; the environment has none.
    assert engine.shell(built.image, "ls /opt/venv/bin | grep -i pip || true") == ""
    places = (
        "/horovod /requirements /wheels /root/.cache /tmp/.cache /opt/venv/lib/*/site-packages/pip"
        " /opt/venv/lib/*/site-packages/torch/include /var/lib/apt/lists/*_Packages*"
    )
    assert engine.shell(built.image, f"ls -d {places} 2> /dev/null || true") == ""


def test_only_what_trains_is_in_it(engine: Engine, built: Built) -> None:
    # The record of a run says the version of the template, and which locks were installed.
    records = ["pyproject.toml", "requirements"]
    entries = engine.shell(built.image, "ls -A /app").split()
    assert entries == ["configs", *records, "runs", "src"]
    assert engine.shell(built.image, "ls -A /app/src").split() == [
        "my_project",
        "my_project_trainer",
    ]


def test_its_size(engine: Engine, built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    size = int(engine("image", "inspect", "--format", "{{.Size}}", built.image).stdout)
    base = int(engine("image", "inspect", "--format", "{{.Size}}", engine.base).stdout)
    with capsys.disabled():
        print(f"\nimage {size / MEGABYTE:.0f} MB, of it {base / MEGABYTE:.0f} MB {engine.base}")
    assert base < size < LARGEST


def test_without_a_command_it_says_what_there_is(engine: Engine, built: Built) -> None:
    assert "find_batch_size" in engine("run", "--rm", "--network", "none", built.image).stdout
