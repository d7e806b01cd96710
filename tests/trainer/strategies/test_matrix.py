"""The matrix of a project's own tests: a row for each strategy, and none for what was removed."""

import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance import test_conformance
from tests.conformance.matrix import MATRIX
from tests.conformance.rows import PROPERTIES, rounding
from tests.project import PACKAGE, ROOT, run

STRATEGIES = Path("src") / f"{PACKAGE}_trainer" / "strategies"
ROWS = Path("tests") / "conformance"
A_STRATEGY = """
from .registry import Entry, Registration
from .replicated.ddp import DDP
REGISTRATION = Registration({"mine": Entry(DDP)})
"""
A_ROW = """
from .rows import Launch, Row
ROWS = {"mine": Row((Launch(2),), only=("sgd",))}
PORTABLE = {}
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A project whose files may be removed."""
    for name in ("src", "tests", "configs", "pyproject.toml"):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copied(ROOT / name, tmp_path / name)
    return tmp_path


def rows_are_right(folder: Path, collected: str = "tests") -> "CompletedProcess[str]":
    """Collect tests of a project, and run the one that compares rows with the registry."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "has_a_row", collected]
    return run(command, cwd=folder, extra={"PYTHONPATH": "src"})


@pytest.mark.slow
def test_a_strategy_needs_a_row_and_a_row_a_strategy(copy):
    strategy, row = copy / STRATEGIES / "mine.py", copy / ROWS / "mine_rows.py"
    strategy.write_text(A_STRATEGY)
    done = rows_are_right(copy, "tests/conformance")
    assert done.returncode == 1
    assert "'mine'" in done.stdout
    row.write_text(A_ROW)
    assert rows_are_right(copy, "tests/conformance").returncode == 0
    strategy.unlink()
    done = rows_are_right(copy, "tests/conformance")
    assert done.returncode == 1
    assert "'mine'" in done.stdout


def test_a_sum_in_another_order_differs_by_less_than_rounding():
    random = np.random.default_rng(0)
    values = random.standard_normal(1000, dtype=np.float32)
    sums = np.stack([np.add.accumulate(random.permutation(values)) for _ in range(200)])
    bound = rounding(1000, float(abs(sums).max()), torch.float32)
    assert bound / 100 < np.ptp(sums[:, -1]) < bound


def test_bounds_allow_for_other_cpus():
    # Of ddp with clipping on CPUs with AMX: 2.5 units in the last place of a loss above 4.
    exact = [way for way in PROPERTIES.values() if "precision" not in way.trainer]
    assert {way.tolerance for way in exact} == {PROPERTIES["clip norm"].tolerance}
    assert 10 * 1.2e-6 < PROPERTIES["clip norm"].tolerance < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_a_capability_reaches_the_processes_of_the_matrix(tmp_path, capability):
    worker = ("-m", "tests.conformance.worker", tmp_path, "reference", "1", "1", "sgd")
    done = run(worker, extra={"ATEN_CPU_CAPABILITY": capability}, fresh=True)
    assert f"CPU capability: {capability}" in done.stdout.splitlines(), done.stderr


def test_what_a_strategy_refuses_is_tested_for_its_reason_only():
    def refused(tests: list[Any]) -> int:
        return sum(way in MATRIX[name].refused for name, _, way in (test.values for test in tests))

    assert refused(test_conformance.TRIED) > 0
    assert refused(test_conformance.TRAINED) == 0
    (by,) = test_conformance.test_resumes_to_the_last_bit.pytestmark
    assert by.args[1] is test_conformance.TRAINED
