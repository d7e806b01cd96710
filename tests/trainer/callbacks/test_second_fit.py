"""Callbacks by identity, second fits, metrics of two stages, and averages of short fits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Callback, ConfigurationError, Trainer
from my_project_trainer.callbacks import EMA, BestCheckpoint, EarlyStopping
from test_callbacks import Counts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from fitting import Descends, quiet

pytestmark = pytest.mark.usefixtures("apart")

STEPS = 4


class Model(Descends):
    """Logs given validation values; its metric is logged in both stages, under two names in one."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.weight, self.values = nn.Parameter(torch.zeros(1)), values
        self.held = {"mean": MeanMetric()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.held["mean"].update(batch[0])
        self.log_dict({"train": self.held["mean"], "again": self.held["mean"]})
        return (batch[0] * self.weight).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.held["mean"].update(batch[0] + 3)
        self.log("val", self.held["mean"])
        value = self.values[min(self.global_step // STEPS, len(self.values)) - 1]
        self.log_dict({"loss/all": value, "gain": -value})


def make(*callbacks: Callback, **options: Any) -> Trainer:
    return quiet(callbacks=callbacks, **{"max_epochs": 4} | options)


def data() -> Any:
    return DataLoader(TensorDataset(torch.tensor([[0.0], [2.0]] * STEPS)), batch_size=2)


def test_two_best_checkpoints_keep_their_own_and_resume_by_identity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    low, high = BestCheckpoint("loss/all"), BestCheckpoint("gain", mode="min")
    options = {"run_name": "run", "resume": "auto", "max_epochs": 3}
    made = make(low, high, **options)
    made.fit(Model(1.0, 3.0, 2.0), data(), data())
    links = {path.name: path.resolve().name for path in Path("runs/run").glob("best*")}
    first, second = "step-00000004", "step-00000008"
    assert links == {"best": first, "best-loss-all": first, "best-gain": second}
    assert {path.name for path in Path("runs/run/checkpoints/best").iterdir()} == {first, second}
    assert made.validate(Model(1.0), data(), checkpoint="best-gain")["val"] == 4.0
    swapped = BestCheckpoint("gain"), BestCheckpoint("loss/all")
    make(*swapped, **options | {"max_epochs": 4}).fit(Model(1.0, 3.0, 2.0, 2.0), data(), data())
    assert [callback.kept[0][1] for callback in swapped] == [8, 4]
    assert "the best loss/all" not in capsys.readouterr().err
    other = BestCheckpoint("loss/all")
    elsewhere = {"resume": "runs/run", "run_name": "other", "max_epochs": 5}
    make(other, **elsewhere).fit(Model(1.0, 3.0, 2.0, 2.0, 4.0), data(), data())
    assert other.kept == [(2.0, 16)]
    told = capsys.readouterr().err
    assert "the best loss/all so far, 1 at step 4, is not in this run's directory, " in told


def test_equal_identities_are_refused_in_a_line() -> None:
    line = r"2 are EarlyStopping\(val, min\), and a checkpoint could not tell their states apart"
    with pytest.raises(ConfigurationError, match=line):
        make(EarlyStopping("val"), EarlyStopping("val", patience=5))
    make(EarlyStopping("val"), EarlyStopping("val", patience=5, name="late"))
    with pytest.raises(ConfigurationError, match="two would write the link best-a-b"):
        make(BestCheckpoint("a/b"), BestCheckpoint("a-b")).fit(Model(1.0), data(), data())


def test_a_second_fit_starts_fresh() -> None:
    stop, best, counts = EarlyStopping("loss/all", patience=2), BestCheckpoint("gain"), Counts()
    made = make(stop, best, counts, max_epochs=5)
    for start in (1.0, 5.0):
        made.fit(Model(*(start + offset for offset in range(5))), data(), data())
        assert (made.global_step, stop.best, counts.count) == (3 * STEPS, start, 3 * STEPS)
        assert (made.run_directory / "best").resolve().name == "step-00000012"  # type: ignore[operator]


def test_a_metric_of_two_stages_is_kept_apart_and_resumes() -> None:
    made = make(max_epochs=1, val_every_n_steps=3)
    made.fit(Model(0.0), data(), data())
    assert [made.metrics[name] for name in ("train", "again", "val")] == [1.0, 1.0, 4.0]
    for steps in (2, 4):
        resumed = Model(0.0)
        made = make(max_epochs=1, max_steps=steps, run_name="cut", resume="auto")
        made.fit(resumed, data(), data())
    assert made.metrics["train"] == 1.0


def test_the_decay_of_a_short_average_warms_up(capsys: pytest.CaptureFixture[str]) -> None:
    ema, plain = EMA(), EMA(warmup=False)
    ones = DataLoader(TensorDataset(torch.ones(2 * STEPS, 1)), batch_size=2)
    for average in (ema, plain):
        make(average, max_epochs=2).fit(Model(0.0), ones, ones)
    said = capsys.readouterr().err
    assert "note: EMA: this fit makes 8 averages, and decay=0.999 is reached after 8990" in said
    assert "decay=0.999 leaves 99% of the first weights" in said
    expected, weight = -0.1, -0.1
    for n in range(1, 8):
        weight -= 0.1
        expected += (1 - (1 + n) / (10 + n)) * (weight - expected)
    assert ema.average["weight"].item() == pytest.approx(expected, abs=1e-6)
    assert plain.average["weight"].item() == pytest.approx(-0.1, abs=0.01)
