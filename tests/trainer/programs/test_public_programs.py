"""More everyday programs of public bug reports: right as in plain torch, or one line in time."""

import time
from typing import Any

import pytest
import torch
from my_project_trainer import DataModule, Trainer, UserError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet

pytestmark = pytest.mark.usefixtures("apart")


class Model(Descends, lr=1.0):
    """Each step subtracts 1 from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (batch[0] * self.weight).mean()


def data(batches: int = 2) -> Any:
    return DataLoader(TensorDataset(torch.ones(batches, 1)), batch_size=1)


def make(**options: Any) -> Trainer:
    return quiet(**{"loggers": (), "max_epochs": 2} | options)


class LeavesGradients(Model):
    def leave(self, *_: Any) -> None:
        with torch.enable_grad():
            (5.0 * self.weight).backward()

    on_train_batch_start = on_train_batch_end = validation_step = leave


def test_gradients_that_others_left_are_not_in_a_step() -> None:
    model = LeavesGradients()
    model.leave()
    make().fit(model, data(4), data())
    assert model.weight.item() == -8.0


class StaysFrozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.modes = StaysFrozen(1), list[bool]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.modes.append(self.norm.training)
        return super().training_step([self.norm(batch[0])], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def test_a_layer_whose_train_keeps_it_in_eval_mode_stays_there() -> None:
    model = Frozen()
    make().fit(model, data(), data())
    assert model.modes == [False] * 4
    assert model.norm.num_batches_tracked == 0


class OneElement(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss.reshape(1, 1)


def test_a_loss_of_one_element_may_have_any_shape() -> None:
    model = OneElement()
    make().fit(model, data())
    assert model.weight.item() == -4.0


class Lookahead(torch.optim.SGD):
    """Its state has a form of its own."""

    def state_dict(self) -> Any:
        return {"base": super().state_dict(), "slow": {}}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (Model, "Model, a class: create it"),
        (nn.Linear(1, 1), "Linear, no TrainingModule: derive its class from it, or make it an at"),
        (torch.compile(Model()), "OptimizedModule, what torch.compile made: give the module itse"),
    ],
)
def test_what_is_no_module_is_one_line(module: Any, line: str) -> None:
    for call in (make().fit, make().test):
        with pytest.raises(UserError, match=f"^the trainer was given {line}"):
            call(module, data())


@pytest.mark.parametrize("name", ["rank_state", "count_samples"])
def test_an_attribute_named_as_a_method_is_one_line(name: str) -> None:
    model = Model()
    setattr(model, name, {})
    with pytest.raises(UserError, match=rf"^Model.{name} is {{}}, not a method: give it another"):
        make().fit(model, data())


class Wraps(Model):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=1.0)


class WithState(DataModule):
    def train_dataloader(self) -> Any:
        return data()

    def state_dict(self) -> Any:
        return {"position": 3}


@pytest.mark.parametrize(
    ("module", "train", "line"),
    [
        (Wraps(), data(), "gave Lookahead, whose state_dict has no 'state' and 'param_groups'"),
        (Model(), WithState(), "WithState.state_dict would not be called: it is no hook; use rank"),
    ],
)
def test_state_that_no_checkpoint_would_have_is_refused(module: Any, train: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        make().fit(module, train)
    assert module.weight.item() == 0.0


def test_a_hyperparameter_that_is_set_is_recorded() -> None:
    model = Model()
    model.hparams = {"lr": 1.0}
    model.save_hyperparameters({"lr": 1.0})
    hparams: Any = model.hparams
    hparams.lr = 0.5
    assert model.hparams == {"lr": 0.5}


class SetsOption(Model):
    def on_train_epoch_start(self) -> None:
        trainer: Any = self.trainer
        trainer.accumulate_grad_batches = 2


def test_an_option_that_a_hook_sets_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"give it to Trainer\(accumulate_grad_batches=…\)"):
        make().fit(SetsOption(), data())


class Device(Model):
    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")  # type: ignore[misc]


def test_a_name_that_is_the_trainer_s_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"Device\.device is set by the trainer: use another"):
        Device()


class LogsRate(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", 5.0)
        return super().training_step(batch, batch_idx)


def test_a_rate_that_a_step_logs_is_the_one_that_is_written() -> None:
    made = make(loggers=["csv"], max_epochs=1)
    made.fit(LogsRate(), data(1))
    assert (made.run_directory / "metrics.csv").read_text().splitlines()[1] == "1,0,lr,5.0"


class NoValidation(Model):
    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def train_dataloader(self) -> Any:
        return data()

    def val_dataloader(self) -> Any:
        return []

    test_dataloader = val_dataloader


def test_an_empty_list_of_loaders_is_none() -> None:
    model = NoValidation()
    make().fit(model)
    assert model.weight.item() == -4.0
    with pytest.raises(UserError, match=r"NoValidation.test_dataloader returned \[\], and no"):
        make().test(model)


class EvalInHook(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)  # type: ignore[assignment]

    def on_train_epoch_start(self) -> None:
        self.norm.eval()


def test_layers_in_eval_mode_stay_there_when_a_run_resumes_within_an_epoch() -> None:
    made = make(max_steps=1)
    made.fit(EvalInHook(), data(3))
    model = EvalInHook()
    make(resume=made.run_directory).fit(model, data(3), data())
    assert model.modes == [False] * 5
    assert model.norm.num_batches_tracked == 0


class Noisy(Model):
    """Adds noise to its weight: other numbers on each rank, unless all seed a generator alike."""

    def __init__(self, *, is_alike: bool) -> None:
        super().__init__()
        self.is_alike = is_alike

    def on_after_optimizer_step(self) -> None:
        generator = torch.Generator().manual_seed(self.global_step) if self.is_alike else None
        self.weight.data += torch.randn((), generator=generator)


def test_ranks_whose_weights_differ_save_none() -> None:
    options = {"strategy": "ddp_fork", "devices": 2}
    make(**options).fit(Noisy(is_alike=True), data())
    with pytest.raises(UserError, match="ranks have different weights after step 1, and they are"):
        make(**options).fit(Noisy(is_alike=False), data())


def test_hooks_that_a_search_does_not_call_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    make().find_batch_size(Noisy(is_alike=True), data())
    assert "find_batch_size does not call Noisy.on_after_optimizer_step" in capsys.readouterr().err


class Pruned(Exception):
    """What a search raises in a hook."""


class IsPruned(Model):
    validation_step = None  # type: ignore[assignment]  # as that of a base class is left out

    def on_train_epoch_end(self) -> None:
        self.log("score", 2.0 + self.current_epoch)
        if self.current_epoch == 1:
            raise Pruned


def test_a_script_reads_the_values_of_a_fit_that_it_has_ended() -> None:
    made = make(max_epochs=3)
    with pytest.raises(Pruned):
        made.fit(IsPruned(), data())
    assert (made.global_step, made.metrics["score"]) == (4, 2.0)
    assert made.run_directory is not None
    assert list((made.run_directory / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "name", ["optimizers", "schedulers", "callbacks", "total_steps", "metrics"]
)
def test_a_hook_cannot_replace_what_a_fit_has(name: str) -> None:
    class Replaces(Model):
        def on_train_epoch_start(self) -> None:
            setattr(self.trainer, name, [])

    with pytest.raises(AttributeError, match=f"^trainer.{name} cannot be changed in a fit"):
        make().fit(Replaces(), data())


class NamesNoRate(torch.optim.SGD):
    """Computes its rate, as Adafactor; a group has a data type, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 1.0
        super().step()
        self.param_groups[0].update(lr=None, dtype=torch.bfloat16)


class WithoutRate(Model):
    def configure_optimizers(self) -> Any:
        optimizer = NamesNoRate(self.parameters(), lr=1.0)
        optimizer.param_groups[0]["lr"] = None
        return optimizer


def test_an_optimizer_may_compute_its_rate_and_have_a_data_type() -> None:
    made = make(max_epochs=1)
    made.fit(WithoutRate(), data())
    assert "lr" not in made.metrics
    resumed = WithoutRate()
    resumed.on_fit_end = lambda: kept.update(resumed.optimizers().param_groups[0])  # type: ignore[method-assign]
    kept: dict[str, Any] = {}
    make(max_epochs=2, resume=made.run_directory).fit(resumed, data())
    assert (resumed.weight.item(), kept["lr"], kept["dtype"]) == (-4.0, None, torch.bfloat16)
    with pytest.raises(UserError, match=r"^an optimizer computes its learning rate"):
        make(learning_rate_scaling="linear", reference_batch_size=2).fit(WithoutRate(), data())


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_fit_computes_gradients_wherever_it_is_called(without: Any) -> None:
    model = Model()
    with without():
        make().fit(model, data())
        assert not torch.is_grad_enabled()
    assert model.weight.item() == -4.0


def test_a_seed_of_the_program_that_is_not_used_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (11, 11, 12):
        torch.manual_seed(seed)
        make().fit(Model(), data())
    torch.manual_seed(13)
    make(seed=5)
    lines = [line for line in capsys.readouterr().err.splitlines() if "manual_seed" in line]
    used = "note: seed=0 is used, not that of torch.manual_seed({0}): give Trainer(seed={0})"
    assert lines == [used.format(11), used.format(12)]


class Unfreezes(Model):
    """Trains its first layer from the second epoch on, in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(()), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0] * self.first], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([self.weight], lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.requires_grad_(True)
            group = {"params": [self.first], "lr": 0.01}
            self.trainer.optimizers[0].add_param_group(group)


@pytest.mark.parametrize("steps", [4, 6, 8])
def test_a_group_that_a_hook_has_added_is_in_the_resume(steps: int) -> None:
    uninterrupted, resumed = Unfreezes(), Unfreezes()
    make(max_epochs=3).fit(uninterrupted, data(4))
    made = make(max_steps=steps)
    made.fit(Unfreezes(), data(4))
    make(max_epochs=3, resume=made.run_directory).fit(resumed, data(4))
    assert uninterrupted.first.item() != 1
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_an_expanded_buffer_is_refused_before_the_first_step() -> None:
    model = Model()
    model.register_buffer("scale", torch.ones(1).expand(4))
    with pytest.raises(UserError, match=r"^scale is an expanded tensor, .*: clone it$"):
        make().fit(model, data())
    assert model.weight.item() == 0


class Slow(torch.utils.data.Dataset[Any]):
    """The first sample comes last."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.5 if index == 0 else 0.0)
        return torch.tensor([float(index)])


class Predicts(Model):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def test_predictions_are_in_the_order_of_the_dataset() -> None:
    predictions = make().predict(Predicts(), DataLoader(Slow(), 1, num_workers=2, in_order=False))
    assert torch.cat(predictions).flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_dataset_of_another_library_is_no_loader() -> None:
    kind: Any = type("Dataset", (list,), {"__module__": "datasets.arrow_dataset"})
    with pytest.raises(UserError, match="Dataset, a dataset, which yields single samples"):
        make().fit(Model(), kind([1, 2]))
