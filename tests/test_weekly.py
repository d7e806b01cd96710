"""What CI leaves out on each push runs once a week."""

from __future__ import annotations

import re

from rendering import ROOT, TEMPLATE
from trainer.weekly import named


def test_each_test_runs_in_the_stages_or_once_a_week() -> None:
    """What stages of a push leave out is what those of the week select."""
    text = (ROOT / ".ci" / "run").read_text()
    functions = dict(re.findall(r"^run_(\w+)\(\) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    assert "TESTS='(slow or needs) and not (gpu or exhaustive)'" in functions["slow"]
    assert "TRAINS='trains and not exhaustive'" in functions["slow"]
    names = ["run_exhaustive_project", "run_exhaustive_trainer", "run_exhaustive_template"]
    assert functions["exhaustive"].split() == names
    assert "make test-template ARGS='-m exhaustive'" in functions["exhaustive_template"]
    assert "\nselected='-m \"not exhaustive\"'\n" in text
    assert "selected='-m exhaustive'\n" in functions["clusters"]
    for name in ("slurm", "ssh", "docker"):
        assert f"run_{name}\n" in functions["clusters"]
        assert 'ARGS="$selected"' in functions[name]
    assert '"exhaustive and not gpu" tests/trainer' in functions["exhaustive_trainer"]
    assert "make conformance " in functions["exhaustive_project"]
    tests = (TEMPLATE / "tests").rglob("*.py")
    marked = {file.parent.name for file in tests if "mark.exhaustive" in file.read_text("utf-8")}
    assert marked == {"conformance"}


def test_what_runs_once_a_week_is_there() -> None:
    for line in named():
        file, _, test = line.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test.partition('[')[0]}\w*\(", text, re.MULTILINE), line
        assert [name for name in named() if line.startswith(name)] == [line]
