"""The locks: that they can be installed without pip's settings, and how they are written."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import install_torch
import lock
import pytest
from linters import TOOLS
from package_index import serve, write_wheel
from rendering import ROOT, TEMPLATE

REQUIREMENTS = TEMPLATE / "requirements"
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
PROJECT = ("torch.txt", "cpu.txt", "cuda.txt", "dev.txt")
EXAMPLE_LOCKS = ("graph.txt", "lora.txt", "streaming.txt")
# Installed into the environment of a rendered project.
TRAINER_TESTS = ROOT / "tests" / "trainer" / "requirements.txt"
MODELS = TRAINER_TESTS.with_name("models.txt")
MOSAICML = TRAINER_TESTS.with_name("mosaicml.txt")
MLFLOW_SERVER = TRAINER_TESTS.with_name("mlflow-server.txt")


def dry_run(
    platform: str, python: str, *locks: Path, folder: Path, more: Sequence[str] = ()
) -> None:
    """Let uv say what it would install: from its own default index, without a file but metadata."""
    options = ("--dry-run", "--require-hashes", "--only-binary", ":all:", "--no-config", "--quiet")
    target = ("--python-platform", platform, "--python-version", python, "--target", str(folder))
    files = [word for path in locks for word in ("--requirement", str(path))]
    done = subprocess.run(
        [TOOLS / "uv", "pip", "install", *options, *more, *target, *files],
        # torch's wheels for macOS are for version 14 and later.
        env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if "Failed to fetch" in done.stderr and "CI" not in os.environ:
        pytest.skip("no package index can be reached")
    # uv leaves no line about a dependency that no lock has: with --require-hashes that is an error.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("python", ["3.11", "3.13"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_project_s_locks_resolve(platform: str, python: str, tmp_path: Path) -> None:
    """On the public index alone, plain torch and all of its libraries."""
    locks = [REQUIREMENTS / name for name in PROJECT]
    examples = [REQUIREMENTS / name for name in EXAMPLE_LOCKS]
    dry_run(platform, python, *locks, *examples, TRAINER_TESTS, MODELS, folder=tmp_path)


def test_the_lock_of_an_environment_of_its_own_resolves(tmp_path: Path) -> None:
    """PyTorch/XLA and libtpu have wheels for Linux on x86-64 only."""
    dry_run("x86_64-manylinux_2_31", "3.12", REQUIREMENTS / "xla.txt", folder=tmp_path)
    locked = lock.entries((REQUIREMENTS / "xla.txt").read_text(encoding="utf-8"))
    versions = {locked[name][0].split()[0] for name in ("torch", "torch-xla")}
    assert versions == {"torch==2.9.0", "torch-xla==2.9.0"}


@pytest.mark.parametrize("platform", [PLATFORMS[0], PLATFORMS[2]])  # zstd has none for the other
def test_a_lock_that_contradicts_the_others_has_wheels(platform: str, tmp_path: Path) -> None:
    dry_run(platform, "3.12", MOSAICML, folder=tmp_path, more=["--no-deps"])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_template_s_locks_resolve(platform: str, tmp_path: Path) -> None:
    dry_run(platform, "3.12", ROOT / "requirements.txt", folder=tmp_path)
    torch = [REQUIREMENTS / "torch.txt", REQUIREMENTS / "cuda.txt"]
    dry_run(platform, "3.12", ROOT / "benchmarks" / "requirements.txt", *torch, folder=tmp_path)


def test_no_package_has_two_versions_for_one_machine() -> None:
    """Locks that are installed side by side agree."""
    pinned: dict[str, set[str]] = {}
    more = ("deepspeed.txt", "etcd.txt", "mlflow.txt", "onnx.txt", "optuna.txt", "wandb.txt")
    locks = [REQUIREMENTS / name for name in (*PROJECT, *more, *EXAMPLE_LOCKS)]
    for path in (*locks, TRAINER_TESTS, MODELS):
        packages = lock.entries(path.read_text(encoding="utf-8"))
        for package, entries in packages.items():
            pinned.setdefault(package, set()).update(entry.split()[0] for entry in entries)
    assert {name: versions for name, versions in pinned.items() if len(versions) > 1} == {}
    assert pinned["torch"] == {"torch==2.13.0"}


def test_each_source_is_locked_after_those_that_constrain_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever engines a project includes; the names come from the files."""
    for source in REQUIREMENTS.glob("*.in"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    asked = []

    def resolve(source: str, _former: str) -> lock.Locked:
        asked.append(Path(source).name)
        return {"torch": ["torch==2.13.0 \\\n    --hash=sha256:0"]}

    monkeypatch.setattr(lock, "HERE", tmp_path)
    monkeypatch.setattr(lock, "resolve", resolve)
    monkeypatch.setattr(lock, "lock_cpu_builds", lambda *_: [])
    monkeypatch.setattr("sys.argv", ["lock.py"])
    lock.main()
    others = ["docs.in", "etcd.in", "graph.in", "lora.in", "mlflow.in", "onnx.in", "optuna.in"]
    others += ["streaming.in", "wandb.in", "xla.in"]
    assert asked == ["cpu.in", "torch.in", "dev.in", "deepspeed.in", *others]
    (tmp_path / "deepspeed.in").unlink()
    lock.main()
    assert asked[14:] == ["cpu.in", "torch.in", "dev.in", *others]


def test_a_source_is_built_in_the_environment_that_its_file_names() -> None:
    paths = REQUIREMENTS.glob("*.in")
    variables = {path.stem: lock.ENVIRONMENT.findall(path.read_text("utf-8")) for path in paths}
    named = {name: pairs for name, pairs in variables.items() if pairs}
    assert named == {"deepspeed": [("DS_BUILD_OPS", "0")]}


def test_every_lock_has_hashes_and_no_addresses() -> None:
    locks = [*REQUIREMENTS.glob("*.txt"), ROOT / "requirements.txt", TRAINER_TESTS, MODELS]
    locks += [MLFLOW_SERVER, MOSAICML]
    assert len(locks) == 23
    entry = r"[a-z0-9-]+==[^ ;]+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    for path in [*locks, ROOT / "benchmarks" / "requirements.txt"]:
        assert re.fullmatch(rf"(#.*\n)+({entry})+", path.read_text(encoding="utf-8")), path


def test_every_lock_has_what_its_source_asks_for() -> None:
    of_cpu = {"cpu.txt", "cuda.txt", "torch.txt"}
    sources = [path.with_suffix(".in") for path in (TRAINER_TESTS, MODELS, MOSAICML)]
    sources.append(ROOT / "requirements.in")
    for source in [*REQUIREMENTS.glob("*.in"), *sources]:
        names = of_cpu if source.name == "cpu.in" else {f"{source.stem}.txt"}
        texts = [source.with_name(name).read_text(encoding="utf-8") for name in names]
        locked = {name for text in texts for name in lock.entries(text)}
        text = source.read_text("utf-8")
        if source.name == "cpu.in" or lock.ALONE in text:
            text += lock.dependencies()
            assert "jsonargparse[signatures]>=4.49,<5\n" in text
        asked = re.findall(r"^([A-Za-z0-9][A-Za-z0-9-]*)", text, re.MULTILINE)
        assert asked
        assert {name.lower() for name in asked} <= locked, source.name


def test_cuda_s_libraries_stand_apart() -> None:
    cuda = lock.entries((REQUIREMENTS / "cuda.txt").read_text(encoding="utf-8"))
    rest = lock.entries((REQUIREMENTS / "cpu.txt").read_text(encoding="utf-8"))
    assert {"nvidia-cublas", "nvidia-nccl-cu13", "cuda-toolkit", "triton"} <= set(cuda)
    assert {"numpy", "sympy", "filelock", "nvidia-ml-py", "setuptools"} <= set(rest)
    assert not set(cuda) & set(rest)
    assert all("sys_platform == 'linux'" in entry for entries in cuda.values() for entry in entries)


def test_the_known_cpu_build_is_in_the_lock() -> None:
    text = (REQUIREMENTS / "torch-cpu.txt").read_text(encoding="utf-8")
    line = install_torch.cpu_line("torch", "2.13.0", "3.11", "x86_64")
    digest = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    assert f"{line} \\\n    --hash=sha256:{digest}\n" in text


def test_cpu_builds_are_read_from_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tags = ("cp311-cp311", "cp312-cp312", "cp313-cp313", "cp313-cp313t", "cp314-cp314")
    wanted = {}
    for version in ("2.13.0+cpu", "2.12.0+cpu", "2.13.0"):
        for tag in tags:
            for machine in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "win_amd64"):
                folder = tmp_path / "cpu" / "torch"
                digest = write_wheel(folder, "torch", version, f"{tag}-{machine}")
                wanted[version, tag, machine] = digest
    with serve(tmp_path) as (address, _asked):
        # The first cannot be reached, the second has no page of torch.
        first = "http://me:canary@127.0.0.1:9/simple"
        lines = lock.lock_cpu_builds(
            "torch", "2.13.0", [first, f"{address}/other", f"{address}/cpu/"]
        )
    assert lines == [
        f"torch==2.13.0+cpu ; python_version == '3.{minor}' and sys_platform == 'linux' and "
        f"platform_machine == '{machine}' \\\n    --hash=sha256:"
        + wanted["2.13.0+cpu", f"cp3{minor}-cp3{minor}", f"manylinux_2_28_{machine}"]
        for minor in (11, 12, 13)
        for machine in ("aarch64", "x86_64")
    ]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("lock.py: http://****@127.0.0.1:9/simple cannot be read (")
    assert said[1].startswith(f"lock.py: {address}/other cannot be read (")
    assert len(said) == 2


def test_known_cpu_builds_stay_where_no_index_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "HERE", tmp_path)
    line = install_torch.cpu_line("torch", "2.13.0", "3.11", "x86_64")
    entry = f"{line} \\\n    --hash=sha256:{hashlib.sha256(b'x').hexdigest()}"
    lock.write("torch-cpu.txt", {"torch": [entry]}, "of a test", "cpu.in")
    assert lock.lock_cpu_builds("torch", "2.13.0", ["http://127.0.0.1:9"]) == [entry]
    line = "lock.py: torch-cpu.txt keeps the hashes of torch that it had: 1"
    assert capsys.readouterr().err.splitlines()[1:] == [line]
    # Another version's would never be installed.
    assert lock.lock_cpu_builds("torch", "2.14.0", ["http://127.0.0.1:9"]) == []
