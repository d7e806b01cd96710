"""What the benchmarks refuse before they measure, and the pages that they write."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
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


@pytest.mark.parametrize(
    ("script", "page"),
    [
        *[("run", "benchmarks"), ("memory", "memory"), ("pipeline", "pipeline"), ("gpu", "gpu")],
        *[("checkpoints", "checkpoints"), ("scale", "scale")],
    ],
)
def test_a_page_has_the_sections_that_its_script_writes(gpu: Any, script: str, page: str) -> None:
    """The other scripts start in a project's environment only; all check folder and page first."""
    code = (BENCHMARKS / f"{script}.py").read_text(encoding="utf-8")
    parser, checked = (
        code.index(text) for text in ("parser(__doc__)", f'report.Page(options, "{page}")')
    )
    assert parser < checked < code.index("page.publish(")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    sections = list(gpu.report.SECTIONS[page])
    assert re.findall(r"<!-- (?!test-gpu)(.+): begin -->", text) == sections
    assert re.findall(r"<!-- (?!test-gpu)(.+): end -->", text) == sections
    for section in sections:
        assert f'"{section}"' in code
    if script != "gpu":
        assert f"`make bench{'' if script == 'run' else f'-{script}'}`" in text
        assert f"(`python benchmarks/{script}.py`)" in text


def test_sections_are_written_between_their_marks(gpu: Any, tmp_path: Path) -> None:
    page = tmp_path / "memory.md"
    options = argparse.Namespace(quick=False, out=tmp_path)
    for text in ("one", "two"):
        gpu.report.Page(options, page.stem).publish({"machine": text}, "<svg/>")
    assert page.with_suffix(".svg").read_text(encoding="utf-8") == "<svg/>"
    before = (ROOT / "docs" / page.name).read_text(encoding="utf-8")
    for section in gpu.report.SECTIONS["memory"]:
        begin, end = map(re.escape, gpu.report.marks(section))
        by = "two" if section == "machine" else "Not measured."
        before = re.sub(f"({begin}).*({end})", rf"\g<1>{by}\n\g<2>", before, flags=re.DOTALL)
    assert page.read_text(encoding="utf-8") == before


def test_the_gpu_benchmark_refuses_a_page_before_it_measures(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text("nothing\n", encoding="utf-8")
    for arguments, code, says in (
        (["--out", str(tmp_path)], 1, f"{page} has no lines <!-- bench-gpu: begin --> and "),
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
    gpu.check_losses(rounds, "loop", ratio=0.1)
    # 8,192 tokens a step of 860 million operations each: 70.4 TFLOPS in 100 ms.
    size = gpu.FULL.size
    assert (size.parameters, size.flops_per_token) == (124_475_904, 860_101_632)
    text = gpu.markdown(gpu.FULL, rounds, "a GPU", ["Lightning is not compared: …"], 989.0)
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
    with pytest.raises(SystemExit, match=r"bundled ends at 5\.000, not near 4\.000"):
        gpu.check_losses(rounds, "loop", ratio=0.1)


def test_the_gpu_benchmark_keeps_each_measurement_and_ends_in_time(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 250.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = tmp_path / "bench.jsonl"
    rounds = gpu.play(["loop", "bundled"], lambda name: {"step_ms": 1.0}, 7, 350, lines)
    # After two rounds in 250 s, a third would end at 375 s.
    assert {name: len(readings) for name, readings in rounds.items()} == {"loop": 2, "bundled": 2}
    kept = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    expected = [(1, "loop"), (1, "bundled"), (2, "bundled"), (2, "loop")]
    assert [(line["round"], line["name"]) for line in kept] == expected
