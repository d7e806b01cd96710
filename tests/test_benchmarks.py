"""What the benchmarks refuse before they measure, and the pages that they write."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import ROOT, ran

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script of the GPU benchmark; it imports no torch by itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for out, says in (
        (tmp_path / "nowhere", f"there is no folder '{tmp_path}/nowhere'; create it first"),
        (BENCHMARKS / "run.py", f"there is no folder '{BENCHMARKS}/run.py'; create it first"),
    ):
        done = ran([sys.executable, "-B", BENCHMARKS / "run.py", "--out", out])
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1] == f"run.py: error: argument --out: {says}"


def test_all_benchmarks_check_their_folder() -> None:
    """The others start in a project's environment only."""
    for script in ("run.py", "memory.py", "pipeline.py", "scale.py"):
        text = (BENCHMARKS / script).read_text(encoding="utf-8")
        assert text.count('parser.add_argument("--out", type=writable, default=') == 1


def paragraphs(script: Path) -> Iterator[str]:
    """Yield the texts of a script that writes a page: its constants, and what `markdown` says."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield re.sub(r"\{[^{}]*\}", "\0", node.value.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "markdown":
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            yield from (each for each in map(str, texts) if "do not edit" in each)


@pytest.mark.parametrize(
    ("script", "page"),
    [
        *[("report", "benchmarks"), ("memory_report", "memory"), ("pipeline_report", "pipeline")],
        *[("checkpoint_report", "checkpoints"), ("scale_report", "scale")],
    ],
)
def test_a_page_says_what_its_script_writes(script: str, page: str) -> None:
    """Both are changed together; numbers are those of the last run."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = list(paragraphs(BENCHMARKS / f"{script}.py"))
    assert len(found) >= 2
    for each in found:
        assert re.search(re.escape(each).replace("\x00", ".+"), text), each


def test_the_gpu_benchmark_refuses_a_page_before_it_measures(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text("nothing\n", encoding="utf-8")
    for arguments, code, says in (
        (["--out", str(page)], 1, f"{page} has no lines <!-- bench-gpu: begin --> and "),
        (["--device", "cpu"], 2, "gpu.py: error: --device cpu: on a CPU only the smoke run"),
        (["--rounds", "2"], 2, "gpu.py: error: --rounds: medians of less than three say nothing"),
    ):
        done = ran([sys.executable, "-B", BENCHMARKS / "gpu.py", *arguments])
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.splitlines()[-1].startswith(says)


def test_the_gpu_benchmark_says_what_it_found_and_what_it_left_out(gpu: Any) -> None:
    def results(*steps: float, peak: float) -> list[dict[str, float]]:
        return [{"step_ms": step, "peak_mib": peak, "loss": 4.0} for step in steps]

    rounds = {
        "loop": results(99, 100, 150, peak=1000),
        "bundled": results(1, 101, 102, peak=1040),
        "loop_compiled": results(50, 50, 50, peak=500),
        "bundled_compiled": results(60, 60, 60, peak=500),
    }
    gpu.check(rounds)
    # 8,192 tokens a step of 860 million operations each: 70.4 TFLOPS in 100 ms.
    assert (gpu.Job().parameters, gpu.Job().flops_per_token) == (124_475_904, 860_101_632)
    text = gpu.markdown(gpu.Job(), rounds, "a GPU", ["Lightning is not compared: …"], 989.0)
    lines = text.splitlines()
    assert "| hand-written loop | 100.00 ms | +0.0% | 81,920 | 7.1% | 1000 MiB | +0.0% |" in lines
    assert "| this trainer | 101.00 ms | +1.0% | 81,109 | 7.1% | 1040 MiB | +4.0% |" in lines
    compiled = "| this trainer, compiled | 60.00 ms | +20.0% | 136,533 | 11.9% | 500 MiB | +0.0% |"
    assert compiled in lines
    assert "- A step of the trainer: +1.0%; the aim of at most +2% is reached." in lines
    assert (
        "- A step of the trainer, compiled: +20.0%; the aim of at most +2% is **missed**." in lines
    )
    assert "- Its peak memory: +4.0%; the aim of at most +3% is **missed**." in lines
    assert lines[-1] == "Lightning is not compared: …"
    rounds["bundled"][1]["loss"] = 5.0
    with pytest.raises(SystemExit, match=r"this trainer ends at 5\.000, not near 4\.000"):
        gpu.check(rounds)


def test_the_gpu_benchmark_keeps_each_measurement_and_ends_in_time(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 250.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gpu, "measure", lambda job, name: {"step_ms": 1.0})
    lines = tmp_path / "bench.jsonl"
    rounds = gpu.play(gpu.Job(), ["loop", "bundled"], 7, 350, lines)
    # After two rounds in 250 s, a third would end at 375 s.
    assert {name: len(found) for name, found in rounds.items()} == {"loop": 2, "bundled": 2}
    kept = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [(each["round"], each["name"]) for each in kept] == [
        *((1, "loop"), (1, "bundled"), (2, "bundled"), (2, "loop")),
    ]


def test_the_gpu_benchmark_writes_between_its_marks(gpu: Any, tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"), encoding="utf-8")
    gpu.check_page(page)
    gpu.write(page, "one\n")
    gpu.write(page, "two\n")
    before, _, rest = page.read_text(encoding="utf-8").partition(gpu.BEGIN)
    assert rest.startswith(f"two\n{gpu.END}")
    assert before.count("<!-- test-gpu: begin -->") == 1
