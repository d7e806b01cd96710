"""FairScale trains the digits; conformance/fairscale_rows.py says what else is compared."""

import json

import pytest

from .project import PACKAGE, fit, run

FOLDER = f"{PACKAGE}_trainer.strategies.fairscale.sharded"
pytest.importorskip(FOLDER, reason="its folder was deleted")


@pytest.mark.slow
@pytest.mark.needs("fairscale")
def test_it_trains_the_digits_on_two_processes(tmp_path):
    strategy = ("--trainer.strategy", "ddp_sharded", "--trainer.accelerator", "cpu")
    steps = ("--trainer.max_epochs", "4", "--trainer.loggers", "[csv]")
    where = ("--trainer.default_root_dir", tmp_path, "--trainer.run_name", "run")
    done = run(fit(*strategy, *steps, *where, "--trainer.devices", "2"), engine="fairscale")
    assert done.returncode == 0, done.stderr
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert attempt["layout"]["world_size"] == 2
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    accuracies = [float(row.split(",")[3]) for row in rows if ",val_accuracy," in row]
    assert accuracies[-1] > 0.8
