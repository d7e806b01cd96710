"""A compiled module computes what it computes uncompiled, alone and under ddp."""

import pytest

from .project import fit, run, trainer

SHORT = [
    *("--trainer.max_epochs", "1", "--trainer.loggers", "[csv]", "--trainer.accelerator", "cpu"),
    *("--trainer.log_every_n_steps", "1", "--model.dropout", "0", "--trainer.run_name", "run"),
]


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["1", "2"])
@pytest.mark.needs("g++")
def test_equals_the_uncompiled(tmp_path, devices):
    losses = []
    for name in ("true", "false"):
        folder = tmp_path / name
        done = run(
            fit(
                *SHORT,
                *("--trainer.default_root_dir", folder, "--trainer.devices", devices),
                *("--trainer.compile", name),
            ),
        )
        assert done.returncode == 0, done.stderr
        rows = (folder / "run" / "metrics.csv").read_text().splitlines()
        losses.append([float(row.split(",")[3]) for row in rows if row.split(",")[2] == "loss"])
    assert len(losses[0]) == 22
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
def test_replicas_refuse(strategy):
    with pytest.raises(
        trainer.ConfigurationError, match="takes no compile: a replica is made anew"
    ):
        trainer.Trainer(accelerator="cpu", max_steps=1, compile=True, strategy=strategy)
