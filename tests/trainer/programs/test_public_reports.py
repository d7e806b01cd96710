"""Everyday programs of public bug reports: right as in plain torch, or one line in time."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import test_public_programs
import torch
from my_project_trainer import Trainer, UserError
from my_project_trainer.callbacks import EMA
from my_project_trainer.module.current_run import TrainerState
from test_public_programs import data
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from fitting import Descends

pytestmark = pytest.mark.usefixtures("apart")


class Model(Descends, lr=1.0):
    """Each step subtracts 1 from its weights; ``b`` is frozen from epoch 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.fails_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] * (self.a + self.b)).mean()

    def on_train_epoch_start(self) -> None:
        self.b.requires_grad_(self.current_epoch == 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.fails_at:
            raise RuntimeError("the disk is full")
        self.log_dict({"a": self.a.sum(), "b": self.b.sum()})


def make(**options: Any) -> Trainer:
    return test_public_programs.make(**{"max_epochs": 3} | options)


def test_a_validation_that_fails_leaves_the_trained_weights_and_not_their_average() -> None:
    model = Model()
    model.fails_at = 4
    with pytest.raises(RuntimeError, match="the disk is full"):
        make(callbacks=[EMA(0.5)]).fit(model, data(), data())
    assert [model.a.item(), model.b.item()] == [-4.0, -2.0]


def test_the_average_of_a_frozen_parameter_reaches_it_as_torch_s_does() -> None:
    expected: Mapping[str, Any] = {"a": -1.0, "b": -1.0}
    for step in range(2, 7):
        trained = {"a": -step, "b": -2}
        expected = {name: (value + trained[name]) / 2 for name, value in expected.items()}
    made = make(callbacks=[EMA(0.5, warmup=False)])
    made.fit(Model(), data(), data())
    assert {name: made.metrics[name] for name in expected} == pytest.approx(expected)


class Outer(Model):
    """Trains another module, which logs, and copies itself at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen, self.copies = Model(), list[Any](), list[Outer]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.inner.global_step, self.inner.current_epoch, self.inner.trainer))
        self.inner.log("inner", 7.0)
        return super().training_step(batch, batch_idx) + self.inner.training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.copies.append(copy.deepcopy(self))


def test_a_training_module_in_another_one_is_in_its_run_and_a_copy_of_both_in_none() -> None:
    model, made = Outer(), make(max_epochs=2)
    made.fit(model, data())
    assert [facts[:2] for facts in model.seen] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert made.metrics["inner"] == 7.0
    for module in (model.inner, model.copies[0], model.copies[0].inner):
        assert module.trainer_state == TrainerState()
    assert [copied.inner.a.item() for copied in model.copies] == [-2.0, -4.0]


class Measured(Model):
    def __init__(self, metric: Any, stage: str, **options: Any) -> None:
        super().__init__()
        self.metric, self.stage, self.options, self.steps = metric, stage, options, 0

    def measure(self, stage: str) -> None:
        if stage == self.stage:
            self.metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
            self.log("acc", self.metric, **self.options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.measure("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure("val")


@pytest.mark.parametrize("stage", ["train", "val"])
@pytest.mark.parametrize(
    ("metric", "what"),
    [
        (
            MulticlassAccuracy(3, average=None),
            r"MulticlassAccuracy computes a tensor of shape \(3,",
        ),
        (ClasswiseWrapper(MulticlassAccuracy(3, average=None)), "ClasswiseWrapper computes dict"),
    ],
)
def test_a_metric_of_several_numbers_is_refused_at_its_first_batch(metric, what, stage):
    model = Measured(metric, stage)
    with pytest.raises(UserError, match=rf"log\('acc'\): {what}") as raised:
        make().fit(model, data(), data())
    assert model.steps == (stage == "train")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "options", [{"on_step": True}, {"on_epoch": False}, {"reduce_fx": "max"}], ids=str
)
def test_what_has_no_effect_on_a_metric_is_refused(options: Any) -> None:
    with pytest.raises(UserError, match="a metric is logged once per epoch"):
        make().fit(Measured(MulticlassAccuracy(3), "train", **options), data())


class Adds(Model):
    """A hook replaces a layer, and may give the new one's parameters to the optimizer."""

    def __init__(self, hook: str, gives: bool = False) -> None:
        super().__init__()
        self.head, self.hook, self.gives = nn.Linear(1, 1), hook, gives

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.head(batch[0]).mean()

    def add(self, hook: str) -> None:
        if hook == self.hook:
            self.head = nn.Linear(1, 1)
            if self.gives:
                group = {"params": [*self.head.parameters()]}
                self.trainer.optimizers[0].add_param_group(group)

    def on_fit_start(self) -> None:
        self.add("fit")

    def on_train_epoch_start(self) -> None:
        self.add(f"epoch {self.current_epoch}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.add(f"step {self.global_step}")

    def on_train_epoch_end(self) -> None:
        self.add(f"end of epoch {self.current_epoch}")


class AddsLater(Adds):
    on_fit_start, on_train_epoch_start = Descends.on_fit_start, Descends.on_train_epoch_start


@pytest.mark.parametrize("hook", ["fit", "epoch 1", "step 1", "step 5", "end of epoch 0"])
def test_a_layer_that_a_hook_adds_is_refused_unless_an_optimizer_has_it(hook: str) -> None:
    module = Adds if hook in ("fit", "epoch 1") else AddsLater
    made = make(checkpoint_every_n_epochs=9)
    with pytest.raises(UserError, match=r"head \(Linear\) was added after configure_optimizers"):
        made.fit(module(hook), data())
    assert (made.global_step == 6) == (hook == "step 5")  # before the next epoch has trained
    made = make()
    made.fit(module(hook, gives=True), data())
    assert made.global_step == 6
    if "epoch" in hook:  # ranks would not average it
        with pytest.raises(UserError, match=r"head \(Linear\) was added after configure_optimize"):
            make(devices=2, strategy="ddp_fork").fit(module(hook, gives=True), data(4))


def test_a_sparse_buffer_is_refused_before_the_first_step() -> None:
    model = Model()
    model.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(UserError, match=r"graph is a tensor of torch.sparse_coo, which .*; keep"):
        make().fit(model, data())
    assert model.a.item() == 0


class Reuses(Model):
    def __init__(self) -> None:
        super().__init__()
        self.output = torch.zeros(1)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"value": self.output.fill_(batch_idx)}


def test_predictions_are_those_of_each_batch_if_the_module_reuses_a_tensor() -> None:
    predictions = make().predict(Reuses(), data(3))
    assert [prediction["value"].item() for prediction in predictions] == [0, 1, 2]


def test_ddp_names_what_is_frozen_during_a_fit() -> None:
    with pytest.raises(UserError, match=r"rank 0 does not use b in a step, .* freezes them later"):
        make(strategy="ddp").fit(Model(), data())


class Resized(Model):
    """Changes its data after each epoch: Lightning's issues 18023 and 21773."""

    def __init__(self, what: str, by: int) -> None:
        super().__init__()
        self.what, self.by, self.drawn = what, by, SubsetRandomSampler(range(4))
        self.samples = [torch.ones(1)] * (4 if what == "dataset" else 9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch.mean() * (self.a + self.b).mean()

    def train_dataloader(self) -> Any:
        sampler = self.drawn if self.what == "sampler" else None
        return DataLoader(self.samples, batch_size=1, sampler=sampler)  # type: ignore[arg-type]

    def on_train_epoch_end(self) -> None:
        if self.what == "dataset":
            self.samples[:] = self.samples[:1] * (len(self.samples) + self.by)
        self.drawn.indices = range(4 + self.by)


@pytest.mark.parametrize("by", [2, -2])
@pytest.mark.parametrize("what", ["dataset", "sampler"])
def test_data_that_changes_its_length_is_named_at_the_next_epoch(what: str, by: int) -> None:
    model = Resized(what, by)
    with pytest.raises(UserError, match=f"the {what} has {4 + by} samples, and had 4") as raised:
        make().fit(model)
    assert "\n" not in str(raised.value)
    assert model.a.item() == -4


class Misspelt(Model):
    """Hooks that nothing would call: Lightning's 2351, "validation code is not called"."""

    def on_train_epoch_ends(self) -> None: ...
    def val_dataloaders(self) -> Any: ...
    def test_step(self, batch: Any, batch_idx: int) -> None: ...
    def test_steps(self) -> None:
        """A method of the user's own, beside the hook itself."""


def test_a_misspelt_hook_is_named_before_the_first_step_also_as_an_attribute() -> None:
    model = Misspelt()
    vars(model)["on_fit_starts"] = print
    with pytest.raises(UserError) as raised:
        make().fit(model, data())
    names = ("on_fit_starts", "on_train_epoch_ends", "val_dataloaders")
    for line, name in zip(str(raised.value).splitlines(), names, strict=True):
        assert f"Misspelt.{name} would not be called" in line
        assert repr(name[:-1]) in line
    assert model.a.item() == 0


def test_functions_assigned_in_the_place_of_hooks_are_called() -> None:
    model, called = Model(), list[int]()
    vars(model)["on_train_batch_end"] = lambda outputs, batch, index: called.append(index)
    make(max_epochs=1).fit(model, data())
    assert called == [0, 1]


def test_a_schedule_stepped_by_hand_is_torch_s() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    vars(model)["configure_optimizers"] = lambda: optimizer
    vars(model)["on_train_epoch_end"] = schedule.step
    make().fit(model, data())
    assert model.a.item() == -2 * (1 + 0.5 + 0.25)


def test_output_of_another_encoding_does_not_end_a_run(monkeypatch, tmp_path):
    folder = tmp_path / "é"
    with (tmp_path / "printed").open("w", encoding="ascii") as printed:
        monkeypatch.setattr("sys.stdout", printed)
        Trainer(
            accelerator="cpu", devices=1, loggers=(), max_epochs=1, default_root_dir=folder
        ).fit(Model(), data())
    assert r"\xe9/" in (tmp_path / "printed").read_text()


def test_a_hook_reads_and_changes_the_optimizer_of_automatic_optimization() -> None:
    class Halves(Model):
        def on_train_epoch_end(self) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] /= 2

    make().fit(model := Halves(), data())
    assert model.a.item() == -(2 + 1 + 0.5)


def test_a_layer_that_is_trained_in_eval_mode_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """``from_pretrained`` gives such a model; frozen layers are in that mode on purpose."""
    model = Model()
    model.net, model.frozen = nn.Linear(1, 1).eval(), nn.Linear(1, 1).requires_grad_(False).eval()
    make().fit(model, data())
    (line,) = (text for text in capsys.readouterr().err.splitlines() if "eval()" in text)
    assert line.endswith(
        "net (Linear) is trained in eval() mode, without dropout; else call its train()"
    )
    model.net.train()
    make().fit(model, data())
    assert "eval()" not in capsys.readouterr().err


def test_an_evaluation_drops_the_last_batch_of_a_loader_that_says_so() -> None:
    class Predicts(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return batch[0].sum()

    loader = DataLoader(TensorDataset(torch.ones(7)), batch_size=2, drop_last=True)
    assert [prediction.item() for prediction in make().predict(Predicts(), loader)] == [2, 2, 2]
    loader = DataLoader(TensorDataset(torch.ones(1)), batch_size=2, drop_last=True)
    with pytest.raises(UserError, match="drop_last=True leaves no batch: 1 samples, batch_size=2"):
        make().predict(Predicts(), loader)


def test_what_predict_step_logs_is_refused() -> None:
    class Logs(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.log("norm", 1.0)

    with pytest.raises(UserError, match=r"log\('norm'\): predict_step does not log; return it"):
        make().predict(Logs(), data())
