"""Idioms of Lightning and of the sources: each works, or is refused in one line."""

from collections.abc import Callable
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import callback_subject as subject
from fitting import quiet

pytestmark = pytest.mark.usefixtures("apart")
DATA = TensorDataset(torch.arange(64.0).view(16, 4) / 64, torch.ones(16, 1))
LOADER: DataLoader[Any] = DataLoader(DATA, batch_size=8)


def fit(module: trainer.TrainingModule, **options: Any) -> trainer.Trainer:
    base = {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False}
    if "num_sanity_val_steps" not in options:
        base["sanity_check"] = 0
    if not {"gpus", "devices"} & options.keys():
        base["devices"] = 1
    if not {"logger", "loggers"} & options.keys():
        base["loggers"] = []
    made = trainer.Trainer(**base | options)
    made.fit(module)
    assert made.global_step == options.get("steps", 2)
    return made


def refused(line: str, work: Callable[[], Any]) -> None:
    """It raises one line that begins so."""
    with pytest.raises(trainer.UserError) as caught:
        work()
    [problem] = caught.value.problems
    assert problem.startswith(line)
    assert len(problem.splitlines()) == 1


def with_method(name: str, method: Callable[..., Any]) -> trainer.TrainingModule:
    return type("Net", (subject.Net,), {name: method})()


@pytest.mark.parametrize(
    "name",
    [
        *("training_epoch_end", "optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"),
        *("on_train_start", "on_epoch_end", "configure_callbacks", "configure_gradient_clipping"),
        *("lr_scheduler_step", "backward", "transfer_batch_to_device", "on_after_batch_transfer"),
        *("on_save_checkpoint", "on_hpc_save", "configure_model", "configure_sharded_model"),
        *("on_after_backward", "tbptt_split_batch", "on_validation_model_eval", "on_predict_end"),
    ],
)
def test_a_hook_that_is_not_called_is_named(name: str) -> None:
    module = with_method(name, lambda self, *given, **named: None)
    refused(f"Net.{name} would not be called: it is no hook; ", lambda: fit(module))


def test_a_hook_of_other_arguments_is_named() -> None:
    module = with_method("on_train_batch_end", lambda self, batch, batch_idx: None)
    line = "Net.on_train_batch_end takes (batch, batch_idx); it is called with (outputs, batch, "
    refused(line, lambda: fit(module))


class _Returns(subject.Net):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(super().training_step(batch, batch_idx))


class _Gets(trainer.Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(outputs)


@pytest.mark.parametrize(
    ("strategy", "devices", "shapes"),
    [("single_device", 1, [(), (1, 4), "text"]), ("dp", 2, [(2,), (2, 4), ["text", "text"]])],
)
def test_what_a_step_returns_is_given_to_hooks(strategy: str, devices: int, shapes: Any) -> None:
    def change(loss: Tensor) -> dict[str, Any]:
        return {"loss": loss, "preds": loss * torch.ones(1, 4), "name": "text"}

    callback, module = _Gets(), _Returns(change)
    received: list[Any] = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: received.append(outputs)
    fit(module, callbacks=[callback], strategy=strategy, devices=devices)
    assert len(callback.outputs) == 2
    assert all(mine is theirs for mine, theirs in zip(received, callback.outputs, strict=True))
    first = callback.outputs[0]
    assert [first["loss"].shape, first["preds"].shape, first["name"]] == shapes
    assert first["preds"].reshape(-1, 4)[:, 0].equal(first["loss"].reshape(-1))
    assert not first["preds"].requires_grad


def test_a_loss_alone_is_given_to_hooks_in_a_dict() -> None:
    callback = _Gets()
    fit(_Returns(lambda loss: loss), callbacks=[callback])
    assert [output.keys() for output in callback.outputs] == [{"loss"}] * 2


def test_a_return_of_validation_is_said() -> None:
    module = with_method("validation_step", lambda self, batch, batch_idx: torch.zeros(()))
    with pytest.warns(UserWarning, match="Net.validation_step returned Tensor, which is not used"):
        fit(module)


def test_should_stop_stops() -> None:
    class Model(subject.Net):
        def on_after_optimizer_step(self) -> None:
            self.trainer.should_stop = self.global_step == 3  # type: ignore[attr-defined]

    made = quiet(max_epochs=9)
    made.fit(Model())
    assert made.global_step in (3, 4)


def test_a_dict_of_loaders_is_for_evaluation() -> None:
    named = {"a": LOADER, "b": LOADER}
    assert {"val_loss/a", "val_loss/b"} <= fit(with_loaders("val_dataloader", named)).metrics.keys()
    line = "Net.train_dataloader returned a dict of loaders: one loader is supported"
    refused(line, lambda: fit(with_loaders("train_dataloader", named)))


def with_loaders(method: str, loaders: Any) -> Any:
    return with_method(method, lambda self: loaders)
