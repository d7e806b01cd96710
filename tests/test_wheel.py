"""`trainer=wheel`: the trainer is one file, which is installed, replaced and unpacked."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
from history import clone_with_working_tree, commit
from rendering import CORE, git, make_repository, render, tree
from test_update import PYTHON, cruft

WHEEL = {"trainer": "wheel"}
FIT = ["-m", "my_project", "fit", "--config", "configs/digits.yaml"]
FIT += ["--trainer.max_epochs", "2", "--trainer.accelerator", "cpu"]
run = partial(subprocess.run, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(tmp_path_factory.mktemp("wheel"), WHEEL, hooks=True)


def wheel_of(project: Path) -> Path:
    [wheel] = project.glob("wheels/*")
    return wheel


def test_the_same_sources_make_the_same_file(project: Path, tmp_path: Path) -> None:
    again = wheel_of(render(tmp_path, WHEEL, hooks=True))
    assert again.name == wheel_of(project).name
    assert again.read_bytes() == wheel_of(project).read_bytes()
    core = wheel_of(render(tmp_path / "core", {**CORE, **WHEEL}, hooks=True))
    assert core.name != again.name
    assert not [name for name in zipfile.ZipFile(core).namelist() if "/tools/" in name]


def test_the_wheel_has_the_files_of_the_sources(project: Path, tmp_path: Path) -> None:
    source = render(tmp_path, hooks=True) / "src"
    with zipfile.ZipFile(wheel_of(project)) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    [metadata] = [name for name in content if name.endswith("/METADATA")]
    described = metadata.removesuffix("/METADATA")
    packed = {name: content[name] for name in content if not name.startswith(described)}
    files = [path for path in source.glob("my_project_trainer/**/*") if path.is_file()]
    assert packed == {path.relative_to(source).as_posix(): path.read_bytes() for path in files}
    listed = list(csv.reader(content.pop(f"{described}/RECORD").decode().splitlines()))
    assert [name for name, hashed, _ in listed if not hashed] == [f"{described}/RECORD"]
    for name, hashed, size in listed[:-1]:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest()).decode()
        assert (hashed, int(size)) == (f"sha256={digest.rstrip('=')}", len(content[name]))
    assert len(listed) - 1 == len(content)
    assert content[metadata].decode().count("Requires-Dist: torch>=2.10\n") == 1


def test_a_project_with_a_wheel_is_small(project: Path) -> None:
    names = {name for name in tree(project) if name.endswith(".py")}
    assert not [name for name in names if "_trainer" in name or "conformance" in name]
    lines = {name: len((project / name).read_text("utf-8").splitlines()) for name in names}
    counts = {name: lines[name] for name in lines if name.startswith(("src/", "tests/", "sweeps/"))}
    assert sum(counts.values()) <= 1500, counts
    [lock] = re.findall(r"^\./(\S+) --hash=sha256:(\w+)$", lock_of(project), re.MULTILINE)
    assert lock[0] == f"wheels/{wheel_of(project).name}"
    assert lock[1] == hashlib.sha256(wheel_of(project).read_bytes()).hexdigest()


def lock_of(project: Path) -> str:
    return (project / "requirements" / "trainer.txt").read_text("utf-8")


def test_an_update_replaces_one_file(tmp_path: Path) -> None:
    template = clone_with_working_tree(tmp_path)
    options = ("--extra-context", json.dumps(WHEEL), "--no-input")
    (tmp_path / "projects").mkdir()
    cruft("create", str(template), *options, cwd=tmp_path / "projects")
    project = tmp_path / "projects" / "my-project"
    make_repository(project)
    before = wheel_of(project).name
    [errors] = template.glob("*/src/*_trainer/errors.py")
    errors.write_text(errors.read_text("utf-8") + "\n# Changed.\n", "utf-8")
    commit(template, "Change the trainer")
    cruft("update", "--skip-apply-ask", cwd=project)
    after = wheel_of(project)
    assert after.name != before
    changed = git(project, "status", "--porcelain", "--untracked-files=all").split()[1::2]
    wheels = {f"wheels/{before}", f"wheels/{after.name}"}
    assert set(changed) == {".cruft.json", "requirements/trainer.txt", *wheels}
    assert hashlib.sha256(after.read_bytes()).hexdigest() in lock_of(project)


@pytest.mark.trains
def test_a_wheel_trains_as_its_sources_do(project: Path, tmp_path: Path) -> None:
    """Installed by its lock, and unpacked; a copy of the project says whose code runs."""
    source = render(tmp_path, hooks=True)
    wanted = trained(source, [str(source / "src")])
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--require-hashes"]
    lock = ["--no-deps", "--target", str(installed), "-r", "requirements/trainer.txt"]
    assert run([*pip, *lock], cwd=project).returncode == 0
    places = [str(project / "src"), str(installed)]
    assert trained(project, places) == wanted
    assert trained(project, places, "--trainer.devices", "2") == trained(
        source, [str(source / "src")], "--trainer.devices", "2"
    )
    [attempt] = json.loads(newest(project, "run.json").read_text("utf-8"))["attempts"]
    assert (attempt["code"], attempt["directory"]) == (str(project / "src"), str(project))
    assert attempt["locks"]["trainer.txt"] == hashlib.sha256(lock_of(project).encode()).hexdigest()
    old = project / "wheels" / "my_project_trainer-0.0.1-py3-none-any.whl"
    wheel_of(project).rename(old)
    line = f"note: the trainer in {installed} runs, not {old.name}: first `make setup`"
    assert line in fit(project, places).stderr
    old.rename(old.with_name(Path(re.findall(r"wheels/(\S+)", lock_of(project))[0]).name))
    ejecting = [sys.executable, "requirements/eject.py"]
    done, again = (run(ejecting, cwd=project) for _ in range(2))
    assert done.stdout == "the trainer is in src/my_project_trainer: commit it\n"
    assert again.stderr.startswith("error: wheels/ has 0 wheels of the trainer, not one")
    assert (done.returncode, again.returncode) == (0, 1)
    assert trained(project, [str(project / "src")]) == wanted


def fit(project: Path, places: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    return run([str(PYTHON), *FIT, *options], cwd=project, env=os.environ | variables)


def newest(project: Path, name: str) -> Path:
    return max(project.glob(f"runs/*/{name}"), key=lambda path: path.stat().st_mtime_ns)


def trained(project: Path, places: list[str], *options: str) -> str:
    """Return the values of a fit, but for how long it took."""
    done = fit(project, places, *options)
    assert done.returncode == 0, done.stderr
    rows = csv.DictReader(newest(project, "metrics.csv").read_text("utf-8").splitlines())
    timed = ("time", "per_second", "memory", "seconds", "mfu")
    return str([{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in rows])
