"""A small model, and callbacks that record what they are called with.

``python -m callback_subject FOLDER`` fits on two ranks; each writes what it has kept and where it
stopped to ``RANK.json``.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.callbacks import BestCheckpoint
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet


class Net(Descends, lr=0.02, momentum=0.5):
    """A linear layer; its validation loss falls, and then rises by what is added to it."""

    def __init__(self, rises_after: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.rises_after = rises_after
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        is_rising = self.rises_after is not None and self.current_epoch >= self.rises_after
        added = self.current_epoch * 100 if is_rising else 0
        self.log("val_loss", mse_loss(self.layer(batch[0]), batch[1]) + added)

    def train_dataloader(self) -> DataLoader[Any]:
        return _loader(32)

    def val_dataloader(self) -> DataLoader[Any]:
        return _loader(16)


def _loader(samples: int) -> DataLoader[Any]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


class Records(trainer.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def _note(self, name: str, run: Any) -> None:
        self.calls.append(f"{name} {run.global_step}")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._note("fit_start", trainer)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self._note("fit_end", trainer)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._note("epoch_start", trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note("epoch_end", trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert batch[0].shape == (8, 4)
        self._note(f"batch_start {batch_idx}", trainer)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note(f"batch_end {batch_idx}", trainer)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        assert 0 < module.layer.weight.grad.norm().item() < 0.1001  # clipped
        self._note("before_step", trainer)

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        self._note("after_step", trainer)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._note("validation_start", trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        assert trainer.metrics["val_loss"] > 0
        self._note("validation_end", trainer)


class Average(trainer.Callback):
    """A running mean of the weights, which depends on every step, and changes the training."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None
        self.steps = 0

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        weight = module.layer.weight.data
        self.steps += 1
        self.mean = weight.clone() if self.mean is None else self.mean.lerp(weight, 0.5)
        weight.lerp_(self.mean, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.steps = state["mean"], state["steps"]


class Stops(trainer.Callback):
    def __init__(self, at: int, rank: int = 0) -> None:
        self.at, self.rank = at, rank

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.at and trainer.global_rank == self.rank:
            trainer.stop("enough")


class Fails(trainer.Callback):
    """Raises in a step; records which error it was told of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        raise ArithmeticError("planted")

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        self.told.append(str(error))
        raise OSError("no disk")


class _Own(Net):
    """Logs a value that falls on rank 0 and rises on rank 1."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        sign = 1.0 if self.global_rank else -1.0
        self.log("own", sign * self.global_step, sync_dist=False)


class _Writes(BestCheckpoint):
    """Writes what was kept at the end, and the last step, to ``RANK.json``."""

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        seen = {"kept": self.kept, "step": trainer.global_step}
        file = trainer.run_directory.parent / f"{trainer.global_rank}.json"
        file.write_text(json.dumps(seen))


def _fit_on_two_ranks(folder: Path) -> None:
    callbacks = [_Writes("own"), Stops(at=7, rank=1)]
    shared = {"max_epochs": 20, "default_root_dir": folder, "run_name": "run"}
    fit = quiet(devices=2, strategy="ddp", callbacks=callbacks, **shared)
    with fit.building():
        fit.fit(_Own())


if __name__ == "__main__":
    _fit_on_two_ranks(Path(sys.argv[1]))
