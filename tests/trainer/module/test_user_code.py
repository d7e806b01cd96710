"""What user code does wrong is said in one line, before it has cost anything."""

import re
import traceback
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer import errors
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.checkpoint import run_directory
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fitting import Descends, quiet


def data(samples: int = 16) -> TensorDataset:
    return TensorDataset(torch.arange(float(samples)).unsqueeze(1))


class Model(Descends, lr=0.01):
    """One weight; eight steps an epoch. What a test changes, it gives as attributes."""

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.__dict__.update(changed)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch[0]).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=2)


def make(folder: Path, **options: Any) -> Any:
    return quiet(**{"max_epochs": 1, "default_root_dir": folder, "run_name": "run", **options})


def line_of(folder: Path, module: Any, *loaders: Any, command: str = "fit", **options: Any) -> str:
    """The one line of the error that a command ends with."""
    with pytest.raises(errors.UserError) as raised:
        getattr(make(folder, **options), command)(module, *loaders)
    [line] = raised.value.problems
    assert "\n" not in line
    return line


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.zeros(4, 1))


NO_BATCHES = "which is not an iterable of batches: return a DataLoader, or another"


@pytest.mark.parametrize(
    ("made", "told", "in_evaluation"),
    [
        (data, " TensorDataset, a dataset, which yields single samples: return DataLoader(", None),
        (Stream, " Stream, a dataset, which yields single samples: return DataLoader(", None),
        (
            lambda: (DataLoader(data()), data()),
            " a tuple of loaders: one loader is supported; ",
            ", as 'dataloader_idx_1', TensorDataset, a dataset, which yields single samples: ",
        ),
        (
            lambda: {"a": data()},
            " a dict of loaders: one loader is supported; ",
            ", as 'a', TensorDataset, a dataset, which yields single samples: ",
        ),
        (lambda: {"x": torch.zeros(4)}, f" dict, {NO_BATCHES}", f", as 'x', Tensor, {NO_BATCHES}"),
        (lambda: 7, f" int, {NO_BATCHES}", None),
        (lambda: "train", f" str, {NO_BATCHES}", None),
    ],
)
@pytest.mark.parametrize("stage", ["train", "val", "test", "predict", "given", "given val"])
def test_what_is_no_loader_is_refused(tmp_path, made, told, in_evaluation, stage):
    command = {"test": "test", "predict": "predict"}.get(stage, "fit")
    module = Model(validation_step=print, test_step=print, forward=print)
    expected = told if stage in ("train", "given") else in_evaluation or told
    if stage.startswith("given"):
        loaders = [made()] if stage == "given" else [DataLoader(data()), made()]
        assert line_of(tmp_path, module, *loaders).startswith(f"the trainer was given{expected}")
        return
    setattr(module, f"{stage}_dataloader", made)
    line = line_of(tmp_path, module, command=command)
    assert line.startswith(f"Model.{stage}_dataloader returned{expected}")


def test_a_loader_that_is_not_there_is_told(tmp_path):
    reason = "Model.train_dataloader returned None, and no loader was given: return a DataLoader"
    assert line_of(tmp_path, Model(train_dataloader=lambda: None)) == f"no batches: {reason}"


@pytest.mark.parametrize(
    "loader", [lambda: DataLoader(data(0), 2), lambda: DataLoader(data(0), 2, drop_last=True)]
)
def test_an_empty_data_set_is_told(tmp_path, loader):
    told = "the dataset of {} is empty: it has no samples to make batches of"
    assert line_of(tmp_path, Model(train_dataloader=loader)) == told.format("training")
    evaluated = Model(val_dataloader=loader, validation_step=print)
    assert line_of(tmp_path, evaluated) == told.format("evaluation")


@pytest.mark.parametrize("loader", [[torch.ones(2, 1), torch.ones(0, 1)], "collated"])
def test_a_batch_without_samples_is_told(tmp_path, loader):
    if loader == "collated":
        sizes = iter([8, 0])
        loader = DataLoader(data(), 8, collate_fn=lambda rows: [torch.ones(next(sizes), 1)])
    assert line_of(tmp_path, Model(), loader).startswith("batch 1 of the loader has no samples")


class Ends(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        if index == 12:
            next(iter(()))
        return torch.ones(1) * index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_stop_iteration_of_the_data_set_does_not_end_the_epoch(tmp_path, workers, in_order):
    made = make(tmp_path, use_distributed_sampler=in_order)
    line = r"the loader ended after \d of 8 batches: its dataset raised StopIteration, or"
    with pytest.raises(errors.UserError, match=line) as raised:
        made.fit(Model(), DataLoader(Ends(), 2, num_workers=workers))
    # torch's frames keep the error and the loader's worker, which garbage collection ends 5 s late.
    traceback.clear_frames(raised.value.__traceback__)


class Nothing(trainer.TrainingModule):
    """Overwrites nothing."""


def test_hooks_that_are_missing_are_told_together(tmp_path):
    with pytest.raises(errors.ConfigurationError) as raised:
        make(tmp_path).check_fit(Nothing())
    assert raised.value.problems == [
        "Nothing has no training_step: override it; it returns the loss of a batch",
        "Nothing has no configure_optimizers: override it; it returns the optimizers",
    ]


@pytest.mark.parametrize(
    ("command", "hook"),
    [
        ("validate", "validation_step"),
        ("test", "test_step"),
        ("predict", "predict_step"),
        ("find_batch_size", "training_step"),
    ],
)
def test_a_command_checks_its_hook_before_it_begins(tmp_path, command, hook):
    module = Nothing()
    module.configure_optimizers = Model.configure_optimizers.__get__(module)
    line = line_of(tmp_path, module, [torch.ones(1)], command=command)
    assert line.startswith(f"Nothing has no {hook}: override it; ")


@pytest.mark.parametrize("has_loader", [True, False])
def test_a_missing_validation_step_is_told_before_the_first_step(tmp_path, has_loader):
    steps = []
    module = Model(training_step=lambda batch, _: steps.append(batch))
    loaders = [module.train_dataloader()] * 2 if has_loader else []
    module.val_dataloader = module.train_dataloader
    line = line_of(tmp_path, module, *loaders)
    assert line.startswith("Model has no validation_step: override it; ")
    assert steps == []


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda loss: None, "training_step returned None: return the loss; or, to skip the batch"),
        (lambda loss: {}, "training_step must return a scalar loss, or a dict with 'loss'; it "),
        (lambda loss: 1.0, "training_step must return a scalar loss, or a dict with 'loss'; it "),
        (lambda loss: loss.expand(2), "training_step must return a scalar loss, or a dict with "),
        (lambda loss: loss.detach(), "training_step gave a loss without a gradient: compute it "),
        (lambda loss: loss.long(), "training_step gave a loss of type torch.int64: give a float"),
    ],
)
@pytest.mark.parametrize("strategy", ["single_device", "dp"])
def test_what_is_no_loss_is_told(tmp_path, loss, told, strategy):
    module = Model(training_step=lambda batch, _: loss((module.weight * batch[0]).mean()))
    line = line_of(tmp_path, module, strategy=strategy)
    # dp has made a vector of the replicas' losses, and a mean of it.
    assert line.startswith(told) or (strategy == "dp" and line.startswith("training_step gave a "))


class Manual(Model):
    """Optimizes manually, with a loss that is none."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss((self.weight * batch[0]).mean()))


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda loss: loss.detach(), "manual_backward gave a loss without a gradient: "),
        (lambda loss: loss.expand(2), r"manual_backward gave a loss of shape \(2,\): give a "),
    ],
)
def test_what_manual_backward_cannot_take_is_told(tmp_path, loss, told):
    assert re.match(told, line_of(tmp_path, Manual(loss=loss)))


class Validates(Model):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.called.append("step")
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.called.append("end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fails:
            raise ArithmeticError("planted")
        self.called.append("validation")
        self.log("val_loss", self.weight * batch[0].mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]

    def val_dataloader(self) -> Any:
        return [torch.ones(1, 1)]


@pytest.mark.parametrize("in_order", [True, False])
def test_an_epoch_is_saved_before_it_is_validated(tmp_path, in_order):
    options = {"max_epochs": 2, "loggers": ["csv"], "use_distributed_sampler": in_order}
    uninterrupted = Validates()
    make(tmp_path, run_name="whole", **options).fit(uninterrupted)
    failing = Validates()
    failing.fails = True
    with pytest.raises(ArithmeticError, match="planted"):
        make(tmp_path, **options).fit(failing)
    [path] = run_directory.complete(tmp_path / "run" / "checkpoints")
    position = checkpoint.Checkpoint(path).state()["position"]
    assert (position["epoch"], position["epoch_done"]) == (0, True)
    resumed = Validates()
    make(tmp_path, resume="auto", **options).fit(resumed)
    # No batch of the first epoch is read again, and its hook is not called again.
    assert resumed.called == ["validation", *["step"] * 8, "end", "validation"]
    assert resumed.weight.equal(uninterrupted.weight)
    logs = [(tmp_path / name / "metrics.csv").read_bytes() for name in ("whole", "run")]
    assert logs[0] == logs[1]
    assert len(run_directory.complete(tmp_path / "run" / "checkpoints")) == 2


def test_a_run_that_ended_is_validated_again_and_logs_its_last_step(tmp_path):
    """Resumed from its last checkpoint, which was saved before the validation."""
    options = {"loggers": ["csv"], "max_epochs": 1, "log_every_n_steps": 5}
    make(tmp_path, **options).fit(Validates())
    log = tmp_path / "run" / "metrics.csv"
    before = log.read_text()
    assert "\n8,0,loss_step," in before
    resumed = Validates()
    make(tmp_path, resume="auto", **options).fit(resumed)
    assert resumed.called == ["validation"]
    assert log.read_text() == before


def test_a_changed_learning_rate_is_told(tmp_path, capsys):
    def configure(module: Any, rate: float) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    for rate in (0.01, 0.01, 0.1):
        capsys.readouterr()
        module = Model()
        module.configure_optimizers = lambda module=module, rate=rate: configure(module, rate)
        make(tmp_path, resume="auto").fit(module)
        told = [line for line in capsys.readouterr().err.splitlines() if "note: lr of" in line]
        assert bool(told) == (rate == 0.1)
    reason = "the checkpoint's is used; resume_options='code' takes the code's"
    assert told == [f"note: lr of optimizer 0: 0.01 in the checkpoint, 0.1 in the code: {reason}"]
