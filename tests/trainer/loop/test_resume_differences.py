"""What a resume restores over the code is said, or taken from the code; ranks keep their state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Callback, CheckpointError, TrainingModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet

pytestmark = pytest.mark.usefixtures("apart")


class Model(TrainingModule):
    """Two layers, whose first is frozen, and a hidden state; four steps an epoch."""

    def __init__(self, schedule: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)
        self.first.requires_grad_(options.pop("trains_first", False))
        self.schedule, self.options, self.hidden = schedule, options, torch.zeros(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0]).tanh() + self.hidden
        self.hidden = hidden.detach().mean(0)
        return self.last(hidden).square().mean()

    def rank_state(self) -> dict[str, Any]:
        return {"hidden": self.hidden, "list": [1, {"x": 0.5}]}

    def load_rank_state(self, state: Any) -> None:
        assert state["list"] == [1, {"x": 0.5}]
        self.hidden = state["hidden"]

    def configure_optimizers(self) -> Any:
        self.adam = torch.optim.AdamW(self.parameters(), **{"lr": 0.1, **self.options})
        self.scheduler = self.schedule(self.adam, self)
        schedule = {"scheduler": self.scheduler, "interval": "step"}
        return {"optimizer": self.adam, "lr_scheduler": schedule}


class Unfreezes(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.first.requires_grad_()


def cosine(length: int) -> Any:
    return lambda adam, module: CosineAnnealingLR(adam, length)


def one_cycle(adam: Any, module: Any) -> Any:
    return OneCycleLR(adam, 0.1, total_steps=module.trainer.total_steps)


def fit(model: Model, steps: int, *callbacks: Callback, **options: Any) -> Model:
    options = {"run_name": "run", "resume": "auto", "callbacks": callbacks} | options
    made = quiet(max_steps=steps, **options)
    data = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    made.fit(model, DataLoader(TensorDataset(data), batch_size=2))
    return model


def test_each_difference_is_said_and_either_side_can_be_taken(capsys: Any) -> None:
    fit(Model(cosine(8)), 3)
    changed = {"weight_decay": 0.5, "betas": (0.5, 0.9), "lr": 0.2}
    model = fit(Model(cosine(16), **changed), 4)
    said = capsys.readouterr().err
    for line in (
        "weight_decay of optimizer 0: 0.01 in the checkpoint, 0.5 in the code: the checkpoint's is",
        "betas of optimizer 0: [0.9, 0.999] in the checkpoint, [0.5, 0.9] in the code",
        "lr of optimizer 0: 0.1 in the checkpoint, 0.2 in the code",
        "T_max of scheduler 0: 8 in the checkpoint, 16 in the code",
        "total_steps: 3 in the checkpoint, 4 in the code",
    ):
        assert said.count(f"note: {line}") == 1
    assert (model.scheduler.T_max, model.adam.param_groups[0]["weight_decay"]) == (8, 0.01)
    model = fit(Model(cosine(16), **changed), 6, resume_options="code")
    line = "weight_decay of optimizer 0: 0.01 in the checkpoint, 0.5 in the code: the code's is"
    assert line in capsys.readouterr().err
    fresh = Model(cosine(16), **changed)
    fresh.configure_optimizers()
    for _ in range(6):
        fresh.scheduler.step()
    for name in ("lr", "weight_decay", "betas"):
        assert model.adam.param_groups[0][name] == fresh.adam.param_groups[0][name]
    fit(Model(cosine(16), **changed), 7)
    assert "of optimizer" not in capsys.readouterr().err


def test_a_schedule_that_would_end_is_refused_before_a_step() -> None:
    fit(Model(one_cycle), 4)
    line = "OneCycleLR ends after total_steps=4, and this fit makes 8"
    with pytest.raises(Exception, match=line):
        fit(Model(one_cycle), 8)
    assert fit(Model(one_cycle), 8, resume_options="code").scheduler.last_epoch == 8


def test_an_unfrozen_layer_and_a_hidden_state_resume_exactly(capsys: Any) -> None:
    uninterrupted = fit(Model(cosine(8)), 7, Unfreezes(), run_name="whole")
    fit(Model(cosine(8)), 6, Unfreezes())
    resumed = fit(Model(cosine(8)), 7, Unfreezes())
    assert "frozen" not in capsys.readouterr().err
    assert not torch.equal(uninterrupted.first.weight, Model(cosine(8)).first.weight)
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert fit(Model(cosine(8), trains_first=True), 8).first.weight.requires_grad
    line = "frozen parameters: ['first.weight', 'first.bias'] in the checkpoint"
    assert line in capsys.readouterr().err


def test_another_number_of_schedulers_is_a_line(tmp_path: Path) -> None:
    fit(Model(cosine(8)), 2)
    model = Model(cosine(8))
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters())  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="it has 1 schedulers, and the code 0"):
        fit(model, 3)
