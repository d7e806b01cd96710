"""The study of batch sizes: what its page says is what its fits reach."""

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "study.csv"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmark's module; runs go into a folder of the test."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("study")


@pytest.mark.parametrize(
    "words", [("SGD", 0.0, "none", 512), ("AdamW", 0.0, "none", 512), ("AdamW", 0.25, "sqrt", 512)]
)
def test_a_fit_reaches_what_the_page_says(study: Any, words: tuple[Any, ...]) -> None:
    """Far from the limit of a rate, where other kernels' rounding does not grow."""
    fit = study.Fit(*words, seed=1)
    with RESULTS.open() as file:
        rows = {tuple(list(row.values())[:5]): row for row in csv.DictReader(file)}
    expected = float(rows[tuple(map(str, fit))]["accuracy"])
    assert study.train(fit, devices=1).accuracy == pytest.approx(expected, abs=0.03)


def test_the_same_global_batch_gives_the_same_loss_on_two_processes(study: Any) -> None:
    fit = study.Fit("AdamW", 0.25, "sqrt", 256, 1)
    one = study.train(fit, devices=1)
    two = study.train(fit, devices=2, strategy="ddp_fork")
    assert two.loss == pytest.approx(one.loss, abs=1e-5)
