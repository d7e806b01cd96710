"""A logged value is reduced over micro-batches and ranks to one number."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from my_project_trainer.errors import UserError
from my_project_trainer.launch import output
from my_project_trainer.logging import BatchContext, metrics, torchmetrics_state
from torch import nn
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import MulticlassAccuracy


def make_recorder() -> Any:
    recorder = metrics.Recorder(lambda tensor, how: tensor, torch.device("cpu"))
    recorder.context = BatchContext(is_recorded=True)
    return recorder


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(-1e3, 1e3)), min_size=1, max_size=9))
def test_means_of_batches_are_the_mean_of_all_samples(batches: list[tuple[int, float]]) -> None:
    recorder = make_recorder()
    for samples, value in batches:
        recorder.context = recorder.context._replace(counted=samples)
        recorder.log("x", value, on_step=False, on_epoch=True)
    repeated = [value for samples, value in batches for _ in range(samples)]
    assert recorder.take_epoch()["x"] == pytest.approx(sum(repeated) / len(repeated), abs=1e-9)


@pytest.mark.parametrize("how", ["mean", "sum", "min", "max"])
def test_a_padding_batch_counts_in_no_reduction(how: str) -> None:
    recorder = make_recorder()
    for value, samples in [(9.0, 0), (3.0, 2), (-9.0, 0)]:
        recorder.context = recorder.context._replace(samples=samples)
        recorder.log("x", value, on_epoch=True, reduce_fx=how, batch_size=2)
    assert recorder.take_step() == {"x_step": 3.0}
    assert recorder.take_epoch() == {"x_epoch": 3.0}


@pytest.mark.parametrize(
    ("how", "result"), [("mean", 1.75), ("sum", 3.0), ("min", -2.0), ("max", 4.0)]
)
def test_reductions_over_a_step_s_micro_batches_and_over_the_epoch(how: str, result: float) -> None:
    recorder = make_recorder()
    for value, samples in [(4.0, 2), (-2.0, 1), (1.0, 1)]:
        recorder.log("x", value, on_epoch=True, reduce_fx=how, batch_size=samples)
    assert recorder.take_step() == {"x_step": result}
    assert recorder.take_step() == {}
    assert recorder.take_epoch() == {"x_epoch": result}


@pytest.mark.parametrize(
    ("options", "step", "epoch"),
    [
        ({}, ["x"], ["x_epoch"]),
        ({"on_step": True}, ["x"], ["x_epoch"]),
        ({"on_epoch": False}, ["x"], []),
        ({"on_epoch": True}, ["x_step"], ["x_epoch"]),
        ({"on_step": False, "on_epoch": True}, [], ["x"]),
    ],
)
def test_names_in_training(options: dict[str, bool], step: list[str], epoch: list[str]) -> None:
    recorder = make_recorder()
    recorder.log("x", 1.0, **options)
    assert list(recorder.take_step()) == step
    assert list(recorder.take_epoch()) == epoch


@pytest.mark.parametrize("options", [{}, {"on_step": True}])
def test_names_in_evaluation(options: dict[str, bool], capsys: Any) -> None:
    recorder = make_recorder()
    output.print_once.cache_clear()
    for _ in range(2):
        with recorder.evaluating():
            recorder.log("x", 1.0, **options)
            assert list(recorder.take_epoch()) == ["x"]
    assert recorder.take_step() == {}
    note = "note: log(on_step=True): evaluations write no values of steps\n"
    assert capsys.readouterr().err == note * len(options)


NOT_LOGGED = "): with on_epoch=False, the value would not be logged"


@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0)])
@pytest.mark.parametrize(
    ("context", "options", "line"),
    [
        (
            *({}, {"on_step": False}),
            "): with on_step=False without on_epoch=True, the value would not be logged",
        ),
        ({"is_training": False}, {"on_epoch": False}, NOT_LOGGED),
        ({"level": "epoch"}, {"on_epoch": False}, NOT_LOGGED),
        (
            *({"level": "epoch"}, {"on_step": True}),
            ", on_step=True): this hook belongs to no step; leave it out",
        ),
        (
            *({"level": "none"}, {}),
            "): nothing is logged in this hook; log in on_train_epoch_end, in "
            "on_validation_epoch_end, or in a step",
        ),
    ],
)
def test_a_value_that_would_not_be_logged_is_refused(context, options, line, value):
    recorder = make_recorder()
    recorder.enter(BatchContext(**context))
    with pytest.raises(UserError) as caught:
        recorder.log("x", value, **options)
    assert caught.value.problems == [f"log('x'{line}"]


@pytest.mark.parametrize("options", [{}, {"on_epoch": True}, {"prog_bar": True}])
def test_a_step_is_kept_until_the_next_one_and_reduced_only_if_it_is_taken(options):
    recorder = make_recorder()
    changed = torch.zeros(())
    for step in range(3):
        for ends_step, value in ((False, 10.0 * step), (True, 10.0 * step + 2)):
            recorder.enter(BatchContext(ends_step=ends_step))
            changed.fill_(value)
            recorder.log("x", changed, **options)
            recorder.log("loss", torch.tensor(value, requires_grad=True), **options)
    recorder.enter(BatchContext(level="epoch"))
    changed.zero_()
    key = "_step" if "on_epoch" in options else ""
    assert recorder.take_step() == {f"x{key}": 21.0, f"loss{key}": 21.0}
    assert recorder.take_step() == {}


def test_a_step_of_which_only_the_last_batch_is_recorded_has_them_all() -> None:
    recorder = make_recorder()
    for is_recorded, value in ((False, 1.0), (False, 2.0), (True, 6.0)):
        recorder.enter(BatchContext(ends_step=is_recorded, is_recorded=is_recorded))
        recorder.log("x", torch.tensor(value))
    assert recorder.take_step() == {"x": 3.0}


@pytest.mark.parametrize("how", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_values_of_steps_count_in_the_epoch_by_default(how: str, kind: Any) -> None:
    uninterrupted, first, second = make_recorder(), make_recorder(), make_recorder()
    parts = [(0.25, 3), (4.0, 1), (-2.0, 2), (1.0, 2)]
    for recorder, logged in [(uninterrupted, parts), (first, parts[:2]), (second, parts[2:])]:
        if recorder is second:
            recorder.load_state(first.state())
        for value, samples in logged:
            recorder.enter(BatchContext(is_recorded=samples == 1))
            recorder.log("a:b/c", kind(value), reduce_fx=how, batch_size=samples)
    expected = {"mean": 0.34375, "sum": 3.25, "min": -2.0, "max": 4.0}[how]
    assert uninterrupted.take_epoch() == second.take_epoch() == {"a:b/c_epoch": expected}


def test_a_value_of_the_epoch_that_is_logged_wins() -> None:
    recorder = make_recorder()
    recorder.log("loss", 1.0)
    with recorder.evaluating():
        recorder.log("loss", 7.0)
        assert recorder.take_epoch() == {"loss": 7.0}
    recorder.enter(BatchContext(level="epoch"))
    recorder.log("loss_epoch", 3.0)
    assert recorder.take_epoch() == {"loss_epoch": 3.0}


def test_ranks_may_log_other_values_of_steps_in_another_order(monkeypatch):
    """The other rank has logged ``other`` twice and ``first``."""

    def reduce(tensor: torch.Tensor, how: str) -> torch.Tensor:
        if how == "max":  # digests of names
            return torch.tensor([1.0, 0.0])
        return tensor + torch.tensor([[6.0, 8.0, 0.0], [1.0, 2.0, 0.0]])

    monkeypatch.setattr(metrics.collectives, "world_size", lambda: 2)
    others = [True, ["mean other_epoch", "mean first_epoch"]]
    monkeypatch.setattr(metrics.collectives, "gather", lambda names: [names, others])
    recorder = metrics.Recorder(reduce, torch.device("cpu"))
    recorder.enter(BatchContext())
    for name, value in (("second", 2.0), ("first", 4.0)):
        recorder.log(name, value)
    totals = {f"{name}_epoch": step for name, step in recorder._steps.items()}
    values = recorder._reduced(totals, may_differ=True)
    assert values == {"first_epoch": 5.0, "other_epoch": 4.0, "second_epoch": 2.0}


def test_the_progress_bar_has_the_newest_value() -> None:
    recorder = make_recorder()
    recorder.log("hidden", 1.0)
    recorder.log("loss", torch.tensor(1.0), prog_bar=True)
    recorder.log("loss", torch.tensor(0.5), prog_bar=True)
    assert {name: float(value) for name, value in recorder.latest.items()} == {"loss": 0.5}


def test_a_tensor_is_detached_and_one_of_one_element_is_a_number() -> None:
    recorder = make_recorder()
    recorder.log("x", torch.tensor([[2.0]], requires_grad=True), prog_bar=True)
    assert not recorder.latest["x"].requires_grad
    assert recorder.take_step() == {"x": 2.0}


def test_a_value_that_is_changed_in_place_later_was_already_taken() -> None:
    recorder = make_recorder()
    value = torch.tensor(1.0, dtype=torch.float64)
    recorder.log("x", value, on_epoch=True, reduce_fx="max")
    value += 5
    assert recorder.take_epoch() == {"x_epoch": 1.0}


def test_sums_are_in_double_precision() -> None:
    recorder = make_recorder()
    for _ in range(1000):
        recorder.log("x", torch.tensor(16777217, dtype=torch.int64), on_epoch=True)
    assert recorder.take_epoch() == {"x_epoch": 16777217.0}


def test_a_tensor_of_several_numbers_is_refused() -> None:
    with pytest.raises(UserError, match=r"^log\('x'\): give one number, not .* shape \(2, 3\)$"):
        make_recorder().log("x", torch.ones(2, 3))


@pytest.mark.parametrize(
    ("name", "how", "line"),
    [
        ("x", "meen", r"^log\('x'\): reduce_fx='meen' is unknown; did you mean 'mean'\?$"),
        *((name, "mean", "give the value a name") for name in ("", " ")),
    ],
)
def test_an_unknown_reduction_or_a_blank_name_is_refused(name, how, line) -> None:
    with pytest.raises(UserError, match=line):
        make_recorder().log(name, 1.0, reduce_fx=how)


def test_only_values_that_are_synced_are_reduced() -> None:
    recorder = metrics.Recorder(
        lambda tensor, how: tensor * 2 if how == "sum" else tensor, torch.device("cpu")
    )
    recorder.log("all", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
    recorder.log("own", 1.0, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=False)
    assert recorder.take_epoch() == {"all": 2.0, "own": 1.0}


def test_evaluation_is_kept_apart_from_training() -> None:
    recorder = make_recorder()
    recorder.context = recorder.context._replace(samples=4, counted=4)
    recorder.log("loss", 1.0, on_epoch=True, prog_bar=True)
    with recorder.evaluating():
        recorder.context = recorder.context._replace(samples=9, counted=9)
        recorder.log("loss", 7.0, prog_bar=True)
        assert recorder.take_epoch() == {"loss": 7.0}
    with pytest.raises(UserError, match="log"), recorder.evaluating():  # training's are kept, too
        recorder.log("y", torch.ones(2))
    assert recorder.context == BatchContext(samples=4, counted=4, is_recorded=True)
    assert recorder.latest == {"loss": 1.0}
    assert recorder.take_step() == {"loss_step": 1.0}
    assert recorder.take_epoch() == {"loss_epoch": 1.0}


@pytest.mark.parametrize("how", ["mean", "sum", "min", "max"])
def test_an_interrupted_epoch_goes_on_as_if_it_had_not_been(how: str) -> None:
    uninterrupted, first, second = make_recorder(), make_recorder(), make_recorder()
    values = [0.1, 0.7, -0.3, 0.2, 0.9]
    for recorder, logged in [(uninterrupted, values), (first, values[:2])]:
        for value in logged:
            recorder.log("a:b/c", value, on_epoch=True, reduce_fx=how, batch_size=3)
            recorder.log("own", value, on_epoch=True, reduce_fx=how, sync_dist=False)
    second.load_state(first.state())
    for value in values[2:]:
        second.log("a:b/c", value, on_epoch=True, reduce_fx=how, batch_size=3)
        second.log("own", value, on_epoch=True, reduce_fx=how, sync_dist=False)
    assert second.take_epoch() == uninterrupted.take_epoch()


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")
        self.seen = nn.ModuleDict({"all": CatMetric()})


def batches(count: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(3, (5,), generator=generator), torch.randint(3, (5,), generator=generator))
        for _ in range(count)
    ]


def test_a_metric_is_computed_over_the_epoch_and_reset() -> None:
    recorder, metric = make_recorder(), MulticlassAccuracy(num_classes=3, average="micro")
    for predicted, label in [([0, 1, 2], [0, 1, 1]), ([2], [2])]:
        metric.update(torch.tensor(predicted), torch.tensor(label))
        recorder.log("accuracy", metric)
    assert recorder.take_step() == {}
    assert recorder.take_epoch() == {"accuracy": 0.75}
    assert not metric.update_called
    assert recorder.take_epoch() == {}


def test_a_metric_of_training_is_not_computed_by_validation() -> None:
    recorder, metric = make_recorder(), MulticlassAccuracy(num_classes=3, average="micro")
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    recorder.log("accuracy", metric)
    with recorder.evaluating():
        assert recorder.take_epoch() == {}
    assert recorder.take_epoch() == {"accuracy": 0.5}


@pytest.mark.parametrize("at", [0, 1, 11, 12])
def test_metrics_interrupted_in_an_epoch_equal_the_uninterrupted(at: int) -> None:
    uninterrupted, first, second = Measured(), Measured(), Measured()
    for module, seen in [(uninterrupted, batches()), (first, batches()[:at])]:
        for predicted, label in seen:
            module.accuracy.update(predicted, label)
            module.seen["all"].update(predicted.float())
    second.seen["all"].update(batches()[0][0].float())  # left by an earlier fit
    torchmetrics_state.load(second, [torchmetrics_state.state(first)])
    for predicted, label in batches()[at:]:
        second.accuracy.update(predicted, label)
        second.seen["all"].update(predicted.float())
    assert torch.equal(second.accuracy.compute(), uninterrupted.accuracy.compute())
    assert second.seen["all"].compute().tolist() == uninterrupted.seen["all"].compute().tolist()
    assert second.accuracy._update_count == 12


def test_a_state_of_a_metric_that_is_gone_is_passed_over() -> None:
    measured = Measured()
    measured.accuracy.update(*batches()[0])
    torchmetrics_state.load(nn.Linear(1, 1), [torchmetrics_state.state(measured)])


@pytest.mark.parametrize("samples", [0, 2])
def test_a_rank_without_samples_joins_in_what_rank_0_has_logged(monkeypatch, samples):
    names = ["mean loss", "sum count", "min low", "max high"]
    # Rank 0's sums and weights over three samples, its extremes, the least one by its negative.
    theirs = {"sum": torch.tensor([[6.0, 3.0], [3.0, 0.0]]), "max": torch.tensor([-1.0, 9.0])}
    reduced: list[str] = []

    def reduce(tensor: torch.Tensor, how: str) -> torch.Tensor:
        reduced.append(how)
        if len(reduced) == 1:  # a number for the names
            return tensor if samples else torch.tensor([7.0, -3.0])
        return tensor + theirs[how] if how == "sum" else torch.maximum(tensor, theirs[how])

    monkeypatch.setattr(metrics.collectives, "world_size", lambda: 2)
    monkeypatch.setattr(metrics.collectives, "gather", lambda local: [[True, names], local])
    recorder = metrics.Recorder(reduce, torch.device("cpu"))
    with recorder.evaluating():
        recorder.context = recorder.context._replace(counted=samples)
        recorder.may_lack_names = True
        for name in names if samples else ():
            how, _, key = name.partition(" ")
            recorder.log(key, 4.0, reduce_fx=how)
        values = recorder.take_epoch()
    assert reduced == ["max", "sum", "max"]
    expected = {"loss": 14 / 5, "count": 7.0} if samples else {"loss": 2.0, "count": 3.0}
    assert values == {**expected, "low": 1.0, "high": 9.0}


@pytest.mark.parametrize("ours", [["loss"], [], ["step"], ["loss", "step"]])
@pytest.mark.parametrize("may_lack", [False, True])
def test_a_rank_that_has_logged_less_is_refused_unless_it_may(monkeypatch, ours, may_lack):
    theirs = [True, ["mean step", "mean loss"]]
    monkeypatch.setattr(metrics.collectives, "world_size", lambda: 2)
    monkeypatch.setattr(metrics.collectives, "rank", lambda: 1)
    monkeypatch.setattr(metrics.collectives, "gather", lambda facts: [theirs, facts])
    recorder = metrics.Recorder(lambda tensor, how: tensor.abs(), torch.device("cpu"))
    recorder.enter(BatchContext(is_recorded=True))
    recorder.may_lack_names = may_lack
    for name in ours:
        recorder.log(name, 2.0)
    if may_lack:
        assert list(recorder.take_step()) == ["step", "loss"]
        return
    line = f"rank 1 logged {', '.join(ours) or 'nothing'} and rank 0 step, loss: log the same names"
    with pytest.raises(UserError, match=line):
        recorder.take_step()


@pytest.mark.parametrize("may_lack", [False, True])
def test_a_metric_object_that_one_rank_did_not_log_is_refused(monkeypatch, may_lack):
    theirs = ["mean loss"]
    monkeypatch.setattr(metrics.collectives, "world_size", lambda: 2)
    monkeypatch.setattr(metrics.collectives, "gather", lambda facts: [[True, theirs], facts])
    recorder = metrics.Recorder(lambda tensor, how: tensor.abs(), torch.device("cpu"))
    recorder.may_lack_names = may_lack
    recorder.log("loss", 2.0)
    # Of this rank alone: no other one waits for it.
    local = MulticlassAccuracy(3, sync_on_compute=False)
    local.update(torch.arange(3), torch.arange(3))
    recorder.log("local", local)
    assert recorder.epoch_values() == {"loss": 2.0, "local": 1.0}
    theirs.append("metric acc")
    with pytest.raises(UserError, match="logged loss and rank 0 loss, acc: log the same names"):
        recorder.epoch_values()
