"""Everyday metrics of public bug reports: their values are those of plain torchmetrics."""

import threading
from typing import Any

import pytest
import torch
import torchmetrics
from my_project_trainer import TrainingModule, UserError
from my_project_trainer.callbacks import StochasticWeightAveraging
from test_public_programs import Model, data, make
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricTracker, MinMaxMetric, RunningMean
from torchmetrics.utilities import dim_zero_cat

pytestmark = pytest.mark.usefixtures("apart")


class Best(Model):
    """Keeps the best value of all validations, and uses one metric in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.mean, self.seen = MaxMetric(), MeanMetric(), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean(100.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.best.update({0: 7.0, 1: 9.0}.get(self.current_epoch, 5.0))
        self.log("best", self.best.compute())
        self.seen += [self.best.compute().item(), self.mean.compute().item()]
        self.mean.reset()


def test_the_best_value_so_far_is_of_all_validations_also_after_a_resume() -> None:
    model = Best()
    made = make(max_epochs=2, sanity_check=0)
    made.fit(model, data(), data())
    assert model.seen == [7.0, 0.0, 9.0, 1.0]
    resumed = Best()
    make(max_epochs=4, sanity_check=0, resume=made.run_directory).fit(resumed, data(), data())
    assert resumed.seen == [9.0, 1.0, 9.0, 2.0, 9.0, 3.0]  # the last validation again


class ReadsMetrics(Model):
    def __init__(self) -> None:
        super().__init__()
        self.of_epochs, self.of_validations = list[Any](), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(self.global_step), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.of_epochs.append(self.trainer.callback_metrics["step"].item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.global_step + batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.log("twice", 2 * self.trainer.metrics["val"])
        self.of_validations.append(self.trainer.metrics["val"])


def test_hooks_at_the_end_of_an_epoch_read_its_values() -> None:
    model = ReadsMetrics()
    made = make(sanity_check=2)
    made.fit(model, data(), data())
    assert (model.of_epochs, model.of_validations) == ([0.5, 2.5], [0.5, 2.5, 4.5])
    assert made.metrics["twice"] == 9.0
    assert made.validate(model, data()) == {"val": 4.5, "twice": 9.0}  # at the fit's last step
    assert make().validate(model, data(), made.run_directory) == {"val": 4.5, "twice": 9.0}
    assert make().validate(model, data()) == {"val": 0.5, "twice": 1.0}


class Tracks(Model):
    """Its metrics keep values of their own, and one grows with each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=True)
        self.extremes, self.running = MinMaxMetric(MeanMetric()), RunningMean(window=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.running.update(float(self.global_step))
        self.log("running", self.running.compute())
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = 99.0 if self.trainer.sanity_checking else [9.0, 5.0, 7.0, 6.0][self.current_epoch]
        self.tracker.update(value)
        self.extremes.update(value)

    def on_validation_epoch_end(self) -> None:
        self.log("best", self.tracker.best_metric())
        self.log_dict(self.extremes.compute())
        self.extremes._base_metric.reset()


def test_metrics_of_many_validations_know_all_of_them() -> None:
    """Not the one before the first step; also after a resume, and one within an epoch."""
    made, model = make(max_epochs=4), Tracks()
    made.fit(model, data(3), data())
    assert model.tracker.compute_all().tolist() == [9.0, 5.0, 7.0, 6.0]
    expected = {"best": 9.0, "raw": 6.0, "max": 9.0, "min": 5.0}
    assert {name: made.metrics[name] for name in expected} == expected
    for options in ({"max_epochs": 2}, {"max_steps": 7}):
        stopped, resumed = make(**options), Tracks()
        stopped.fit(Tracks(), data(3), data())
        again = make(max_epochs=4, resume=stopped.run_directory)
        again.fit(resumed, data(3), data())
        assert resumed.tracker.compute_all().tolist() == [9.0, 5.0, 7.0, 6.0]
        assert again.metrics == made.metrics


class LogsItsWeight(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("weight", self.weight)
        if self.global_step == 2:
            self.trainer.stop()
        return super().training_step(batch, batch_idx)


def test_a_parameter_is_logged_as_it_is_before_the_step() -> None:
    made = make(log_every_n_steps=50)
    made.fit(LogsItsWeight(), data(9))
    assert (made.global_step, made.metrics["weight"]) == (3, -2.0)


def test_an_average_of_epochs_that_are_not_reached_is_refused() -> None:
    with pytest.raises(UserError, match="start_epoch=2 is not reached with max_epochs=2"):
        make(callbacks=[StochasticWeightAveraging(2)]).fit(Model(), data())
    make(callbacks=[StochasticWeightAveraging(2)], fast_dev_run=True).fit(Model(), data())


class Reduces(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("sum", float(batch_idx), on_epoch=True, reduce_fx=torch.sum)
        self.log("most", float(batch_idx), on_epoch=True, reduce_fx=max)
        return super().training_step(batch, batch_idx)


def test_values_may_be_reduced_by_functions_of_that_name() -> None:
    made = make(max_epochs=1)
    made.fit(Reduces(), data(4))
    assert (made.metrics["sum_epoch"], made.metrics["most_epoch"]) == (6.0, 3.0)


def test_threads_show_their_errors_as_before_a_fit() -> None:
    before = threading.excepthook
    make(loggers=["tensorboard"]).fit(Model(), data())
    assert threading.excepthook is before


class Items(torchmetrics.Metric):
    """Keeps its items in lists, which torchmetrics gathers one by one, or concatenates."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("items", [], dist_reduce_fx=None)
        self.add_state("counts", [], dist_reduce_fx=None)
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("numbers", [], dist_reduce_fx="cat")

    def update(self, values: torch.Tensor) -> None:
        for value in values:
            self.items.append(torch.full((int(value), 2), float(value)))
            self.counts.append(value.long())
            self.numbers.append(value.long())
        self.rows.append(values.long()[:, None].expand(-1, 3))

    def compute(self) -> torch.Tensor:
        rows, numbers = dim_zero_cat(self.rows), dim_zero_cat(self.numbers)
        assert (rows.dtype, rows.shape[1:], numbers.dtype) == (torch.int64, (3,), torch.int64)
        assert sorted(rows.sum(1)) == sorted(3 * numbers)
        assert [len(item) for item in self.items] == [int(count) for count in self.counts]
        return sum(item.sum() for item in self.items) + 1000.0 * len(self.items)


class Gathers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Items()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(batch[0].reshape(-1))
        self.log("items", self.metric)


@pytest.mark.parametrize("batch_size", [4, 5])
def test_ranks_may_have_different_numbers_of_items_or_no_batch(batch_size: int) -> None:
    values = torch.arange(1.0, 6.0)
    loader = DataLoader(TensorDataset(values.reshape(-1, 1)), batch_size=batch_size)
    expected = (2 * values**2).sum().item() + 5000.0
    for options in ({"devices": 1}, {"devices": 2, "strategy": "ddp_fork"}):
        made = make(**options)
        made.fit(Gathers(), data(), loader)
        assert made.metrics["items"] == expected


class Decays(Model):
    """A manual schedule: a hook halves the rate after each step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] /= 2


def test_a_logged_rate_is_that_of_its_step() -> None:
    made, model = make(log_every_n_steps=1), Decays()
    made.fit(model, data())
    assert (made.metrics["lr"], model.weight.item()) == (0.125, -(1 + 0.5 + 0.25 + 0.125))


class Names(Model):
    values: list[dict[str, Any]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for named in self.values:
            self.log(value=1.0, **named)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("other", [{"name": "a_step"}, {"name": "a_epoch"}], ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_name_that_another_value_has_is_refused(other: dict[str, Any], is_first: bool) -> None:
    module, values = Names(), [{"name": "a", "on_epoch": other["name"] == "a_step" or None}, other]
    module.values = values if is_first else values[::-1]
    line = rf"^log\('{other['name']}'\): log\('a'\) writes values of this name, too: use another$"
    with pytest.raises(UserError, match=line):
        make().fit(module, data())


class AddsToLoss(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("value", loss)
        loss += 100.0
        if self.global_step == 2:
            self.trainer.stop()
        return loss


def test_a_value_that_is_changed_later_is_not_logged_as_another() -> None:
    made = make(max_epochs=9)
    made.fit(AddsToLoss(), data())
    assert (made.global_step, made.metrics["value"]) == (3, -0.5)  # of the first epoch


class Inner(TrainingModule):
    """Logs from inside a module, to which a hook has added it."""

    def forward(self) -> None:
        self.log("inner", 2.0)


class Outer(Model):
    again: dict[str, Any]

    def on_fit_start(self) -> None:
        self.inner = Inner()

    def training_step(self, batch: Any, **named: Any) -> Any:
        self.inner()
        self.log("kept", 1.0, reduce_fx="max")
        if self.global_step == 3:
            self.log("kept", 5.0, **self.again)
        return super().training_step(batch, 0)


@pytest.mark.parametrize("again", [{}, {"reduce_fx": "max", "sync_dist": False}])
def test_modules_inside_log_and_a_name_has_one_reduction(again: dict[str, Any]) -> None:
    module, made = Outer(), make(max_epochs=9, log_every_n_steps=1)
    module.again = again
    with pytest.raises(
        UserError, match=r"log\('kept'\): another reduce_fx or sync_dist than before"
    ):
        made.fit(module, data())
    assert (made.global_step, made.metrics["inner"]) == (3, 2.0)
