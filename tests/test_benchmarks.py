"""What the benchmarks refuse before they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rendering import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for out, says in (
        (tmp_path / "nowhere", f"there is no folder '{tmp_path}/nowhere'; create it first"),
        (BENCHMARKS / "run.py", f"there is no folder '{BENCHMARKS}/run.py'; create it first"),
    ):
        done = subprocess.run(
            [sys.executable, "-B", BENCHMARKS / "run.py", "--out", out],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1] == f"run.py: error: argument --out: {says}"


def test_both_benchmarks_check_their_folder() -> None:
    """The other one starts in a project's environment only."""
    for script in ("run.py", "memory.py"):
        text = (BENCHMARKS / script).read_text(encoding="utf-8")
        assert text.count('parser.add_argument("--out", type=writable, default=') == 1
