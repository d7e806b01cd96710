"""How long ddp and a parameter server take to 95 % accuracy if one of four workers is slow.

Prints a table for the docs (``pytest -s``); its times depend on the machine, and nothing on them.
"""

import csv
from itertools import pairwise
from pathlib import Path

import pytest
from tests.project import fit, run

from processes import at_root

EPOCHS = 14
WAYS = {
    "`ddp`": ("ddp", "{}"),
    "`parameter_server`, `max_staleness: 0`": ("parameter_server", "{max_staleness: 0}"),
    "`parameter_server`, `max_staleness: 8`": ("parameter_server", "{max_staleness: 8}"),
    "`parameter_server`, `max_staleness: null`": ("parameter_server", "{max_staleness: null}"),
}


def measured(folder: Path, strategy: str, options: str) -> tuple[int, float, float, float]:
    """Epochs and seconds to 95 %, the last accuracy, and seconds per epoch."""
    words = fit(
        *("--model", "straggler_subject.Straggler", "--trainer.accelerator", "cpu"),
        *("--trainer.strategy", strategy, "--trainer.strategy_options", options),
        *("--trainer.devices", "4", "--trainer.max_epochs", str(EPOCHS)),
        *("--trainer.default_root_dir", folder, "--trainer.run_name", "run"),
        *("--trainer.enable_progress_bar", "false", "--trainer.loggers", "[csv]"),
    )
    done = run(words, cwd=folder, extra=at_root())
    assert done.returncode == 0, done.stderr
    with (folder / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [float(row["value"]) for row in rows if row["name"] == "val_accuracy"]
    starts = [float(line) for line in (folder / "epochs").read_text().splitlines()]
    each = [later - earlier for earlier, later in pairwise(starts)]
    reached = next((epoch for epoch, value in enumerate(found[:-1], 1) if value >= 0.95), None)
    assert reached is not None, found
    return reached, sum(each[:reached]), found[-1], sum(each) / len(each)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_time_to_accuracy_with_a_slow_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ("strategy", "epochs to 95 %", "seconds to 95 %", "seconds per epoch", "last accuracy")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, (strategy, options) in WAYS.items():
        folder = tmp_path / str(len(lines))
        folder.mkdir()
        reached, seconds, last, each = measured(folder, strategy, options)
        lines.append(f"| {name} | {reached} | {seconds:.1f} | {each:.2f} | {last:.3f} |")
    with capsys.disabled():
        print("", *lines, sep="\n")
