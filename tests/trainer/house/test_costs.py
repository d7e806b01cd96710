"""What a fit in one process costs beyond a hand-written loop, without a clock.

Each number is a limit that only falls: lower it when the trainer gets cheaper.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.project import ROOT

SUBJECT = Path(__file__).parents[1] / "cost_subject.py"
# Repeatable sizes: one thread, and the allocator's thresholds where they stay.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "PYTHONPATH": str(ROOT / "src"),
    "GIT_CEILING_DIRECTORIES": str(ROOT.resolve().parent),  # a repository's changes cost
}
KINDS = ("bare", "defaults")
_TENSORBOARD = {"absl", "fsspec", "google", "tensorboard"}
PACKAGES = {"bare": {"safetensors"}, "defaults": {"safetensors", *_TENSORBOARD}}
# The trainer's files that are imported, those of which a function is called, and their lines.
IMPORTED = {"bare": 91, "defaults": 91}
EXECUTED = {"bare": 59, "defaults": 62}
LINES = {"bare": 11_554, "defaults": 11_845}
# More than the loop's in each step that is not logged, and the loop's peak times so much.
CALLS = {"bare": 27, "defaults": 33}
OPERATIONS = {"bare": 4, "defaults": 6}
MEMORY = {"bare": 1.03, "defaults": 1.045}


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the loop costs, and each kind of a fit: in processes of their own."""
    return {kind: measured(kind, tmp_path_factory.mktemp(kind)) for kind in ("loop", *KINDS)}


def measured(kind: str, folder: Path) -> dict[str, Any]:
    # Not forked: a process that has imported torch before would have its peak.
    command = [sys.executable, str(SUBJECT), kind]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


@pytest.mark.parametrize("kind", KINDS)
def test_packages_that_a_fit_imports(costs: dict[str, dict[str, Any]], kind: str) -> None:
    assert set(costs[kind]["packages"]) - set(costs["loop"]["packages"]) == PACKAGES[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_a_fit_imports_and_executes(costs: dict[str, dict[str, Any]], kind: str) -> None:
    lines = costs[kind]["lines"]
    assert costs[kind]["modules"] <= IMPORTED[kind]
    assert len(lines) <= EXECUTED[kind], lines
    assert sum(lines.values()) <= LINES[kind], lines


@pytest.mark.parametrize("kind", KINDS)
def test_python_calls_and_operations_of_a_step(costs: dict[str, dict[str, Any]], kind: str) -> None:
    assert costs[kind]["calls"] - costs["loop"]["calls"] <= CALLS[kind]
    assert costs[kind]["operations"] - costs["loop"]["operations"] <= OPERATIONS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_peak_memory_of_a_fit(costs: dict[str, dict[str, Any]], kind: str) -> None:
    assert costs[kind]["peak_kib"] / costs["loop"]["peak_kib"] <= MEMORY[kind]
