"""What goes into a build, and how little of it is done again."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest
from hostile import CANARY as MADE_BY_CODE
from hostile import HOSTILE
from package_index import write_wheel
from rendering import DEFAULTS, render, tree

from .conftest import CANARY, IN_SOURCES, Built
from .engine import HARDENED, Engine

# The seconds that a change of the code may cost.
LONGEST_REBUILD = 20
# Prints where Python's headers are.
HEADERS = (
    """ls "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h\""""
)


def test_secrets_reach_pip_and_stay_nowhere(engine: Engine, built: Built) -> None:
    assert "https://builder:****@localhost:9/" in built.log
    assert CANARY not in built.log
    assert CANARY not in engine("history", "--no-trunc", built.image).stdout
    assert CANARY not in engine("inspect", built.image).stdout
    # What the sources hold is found, so a secret would be.
    command = built.project / "src" / "my_project_trainer" / "cli" / "command.py"
    known = command.read_bytes().splitlines()[0]
    assert engine.search(built.image, [CANARY.encode(), known]) == {known}


def test_a_change_of_the_code_is_built_in_seconds(
    engine: Engine, built: Built, build_secrets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    changed = built.project / "src" / "my_project" / "__init__.py"
    before = changed.read_bytes()
    image = f"{built.image}-changed"
    try:
        changed.write_bytes(before + f"\nPLANTED = {IN_SOURCES!r}\n".encode())
        began = time.monotonic()
        engine.make(built.project, "docker", f"IMAGE={image}", *build_secrets)
        took = time.monotonic() - began
        with capsys.disabled():
            print(f"\na change of the code was built in {took:.1f} s")
        assert took < LONGEST_REBUILD
        said = engine.shell(image, "python -c 'import my_project; print(my_project.PLANTED)'")
        assert said.strip() == IN_SOURCES
        # All but the sources' own layer are those of before.
        assert engine.layers(image)[:-1] == engine.layers(built.image)[:-1]
        assert engine.layers(image)[-1] != engine.layers(built.image)[-1]
        assert engine.config(image)["Labels"]["org.opencontainers.image.revision"].endswith(
            "-dirty"
        )
    finally:
        changed.write_bytes(before)
        engine("rmi", "--force", image, check=False)


def test_the_variant_for_gpus_takes_the_plain_torch_and_cuda_s_libraries(
    engine: Engine, build_secrets: list[str], tmp_path: Path
) -> None:
    """With a torch and a library of a kilobyte: gigabytes of CUDA are not for a smoke test."""
    project = render(tmp_path)
    requirements = project / "requirements"
    for lock, name, version in (("torch", "torch", "2.13.0"), ("cuda", "cudalib", "13.0")):
        digest = write_wheel(requirements / "wheels", name, version)
        text = f"{name}=={version} \\\n    --hash=sha256:{digest}\n"
        (requirements / f"{lock}.txt").write_text(text)
    image = "my-project:0.1.0-cuda"
    flags = f"DOCKER_FLAGS=--network {engine.network} --target builder"
    base = f"BASE_IMAGE={engine.base_compiler}"
    engine.make(project, "docker", "VARIANT=cuda", base, flags, *build_secrets)
    try:
        has_compiler = engine.shell(image, f"command -v cc; command -v g++; {HEADERS}")
        listed = ("pip", "list", "--format", "freeze")
        installed = engine("run", "--rm", "--network", "none", image, *listed).stdout.split()
    finally:
        engine("rmi", image)
    # The CPU build lies beside it, and has the higher version.
    assert {"torch==2.13.0", "cudalib==13.0"} <= set(installed)
    assert [Path(line).name for line in has_compiler.splitlines()] == ["cc", "g++", "Python.h"]
    assert list((requirements / "wheels").glob("torch-2.13.0+cpu-*.whl"))


def test_with_a_compiler_it_compiles_the_model(
    engine: Engine, built: Built, build_secrets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    image = f"{built.image}-compiler"
    flags = f"DOCKER_FLAGS=--network {engine.network} --build-arg STAGE=compiler"
    base = f"BASE_IMAGE={engine.base_compiler}"
    # A file system in which compiled kernels may run.
    user = [f"{word}:exec" if word == "/tmp" else word for word in HARDENED]  # noqa: S108
    fit = ("fit", "--config", "configs/digits.yaml", "--trainer.compile", "true")
    runs = ("--rm", *user, "--tmpfs", "/app/runs")
    try:
        engine.make(built.project, "docker", base, f"IMAGE={image}", flags, *build_secrets)
        said = engine("run", *runs, image, *fit, "--trainer.max_epochs", "1").stdout
        size = int(engine("inspect", "--format", "{{.Size}}", image).stdout)
    finally:
        engine("rmi", "--force", image, f"{image}-{built.commit[:12]}", check=False)
    assert "done after 22 steps" in said
    with capsys.disabled():
        print(f"\nwith a compiler the image has {size / 10**9:.2f} GB")
    said = engine("run", *runs, built.image, *fit, check=False).stdout
    assert "error: compile needs a C++ compiler: install g++" in said


def test_engines_are_built_in(engine: Engine, built: Built, build_secrets: list[str]) -> None:
    image = f"{built.image}-engines"
    engines = "ENGINES=fairscale deepspeed"
    try:
        engine.make(built.project, "docker", engines, f"IMAGE={image}", *build_secrets)
        said = engine.shell(image, "python -c 'import fairscale.nn, deepspeed; print(\"both\")'")
        assert said.splitlines()[-1] == "both"
    finally:
        engine("rmi", "--force", image, f"{image}-{built.commit[:12]}", check=False)


def test_an_engine_that_is_not_there_is_refused_in_one_line(
    engine: Engine, built: Built, build_secrets: list[str]
) -> None:
    with pytest.raises(AssertionError, match="there is no engine 'nccl'; there are: deepspeed, f"):
        engine.make(built.project, "docker", "ENGINES=nccl", "IMAGE=x:y", *build_secrets)


def test_hostile_answers_name_the_image_and_run_nothing(
    engine: Engine, built: Built, build_secrets: list[str], tmp_path: Path
) -> None:
    code = (
        HOSTILE["command substitution"]
        + HOSTILE["backticks"]
        + HOSTILE["single quote"]
        + HOSTILE["double quote"]
        + " ${COMMIT} $COMMIT $(shell touch canary) \\ # ; touch canary"
    )
    answers = DEFAULTS | {
        "project_name": code,
        "project_slug": "a_-b__c",
        "package_name": "mine",
        "description": code,
        "author_name": code,
        "version": "1!2.0+local.1",
        "trainer": "wheel",
    }
    project = render(tmp_path, answers, hooks=True)
    image = f"smoke-{secrets.token_hex(4)}:hostile"
    engine.make(project, "docker", f"IMAGE={image}", *build_secrets)
    try:
        labels = engine.config(image)["Labels"]
        assert labels["org.opencontainers.image.description"] == code
        assert labels["org.opencontainers.image.title"] == "a_-b__c"
        assert labels["org.opencontainers.image.version"] == "1!2.0+local.1"
        assert not {name for name in tree(project) if Path(name).name == MADE_BY_CODE}
        assert engine.shell(image, f"find /app /tmp -name {MADE_BY_CODE}") == ""
        assert "usage: mine" in engine("run", "--rm", "--network", "none", image).stdout
        where = engine.shell(image, "python -c 'import mine_trainer; print(mine_trainer.__file__)'")
        assert "/site-packages/mine_trainer/" in where  # it is the wheel's
        # The name that it has by default is one that Docker takes.
        engine.make(project, "docker", *build_secrets)
        engine("rmi", "a--b--c:1-2.0-local.1")
    finally:
        engine("rmi", "--force", image)
