"""Tests of the trainer, on a rendered project: RENDERED_PROJECT, or that of `make project`.

They run in the project's environment. `tests.project` and other helpers are the project's own; what
a test runs in processes of its own is found by its name alone: ``preemption_subject.Slow``.
"""

import gc
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parents[1] / "build" / "test" / "my-project"
PROJECT = Path(os.environ.get("RENDERED_PROJECT") or DEFAULT).resolve()
if not (PROJECT / "tests" / "project.py").is_file():
    raise SystemExit(f"there is no rendered project in {PROJECT}: make project")
# A test may train a module of its own in other processes, or one of another test.
TESTS = sorted({file.parent for file in HERE.glob("*/test_*.py")} - {*HERE.glob("*gpu")})
TOOLS = HERE.parents[1] / "tools"
FOLDERS = [str(folder) for folder in (PROJECT / "src", PROJECT, HERE, TOOLS, *TESTS)]
sys.path[:0] = FOLDERS
# For the processes that tests start, in any directory, and for pytest's own workers.
os.environ["RENDERED_PROJECT"] = str(PROJECT)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
)

# `make test-gpu` runs the checks in gpu/ where hypothesis need not be installed.
if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # How long an example takes says something of the machine, not of the code.
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")

pytest_plugins = ["tests.conftest", "file_times", "weekly"]
# PyTorch/XLA has an environment of its own: `make test-xla` runs these.
collect_ignore = [] if importlib.util.find_spec("torch_xla") else ["strategies/test_xla_runs.py"]


def pytest_configure() -> None:
    """More tables after the tests."""
    from tests.conftest import TABLES

    TABLES["models"] = ("largest difference from one process", ["model"])
    TABLES["pairs"] = ("options in pairs", ["strategy"])
    TABLES["refused pairs"] = ("pairs of options that are refused", ["pair"])


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: a search for it leaves them out."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _outside_of_a_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of this process record no commit, for which each would start git."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working-directory-"))
        yield


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, no launch around; Python's path and torch's switches are put back."""
    import torch
    from my_project_trainer.run import environment

    from bad_inputs import RANK

    for name in [*RANK, "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", *environment.KNOWN]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nothing_runs(apart: None, tmp_path: Path) -> Iterator[None]:
    """As ``apart``, and no run may have begun."""
    yield
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock of the trainer's measurements of speed."""
    from my_project_trainer.logging import progress
    from my_project_trainer.loop import parts

    from fake_clock import Clock

    made = Clock()
    fake = SimpleNamespace(perf_counter=made.perf_counter, monotonic=time.monotonic)
    for module in (progress, parts):
        monkeypatch.setattr(module, "time", fake)
    return made
