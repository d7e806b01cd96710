"""A small model that records which samples it sees, and runs of it with limits on two processes.

``python -m control_subject FOLDER`` fits under several strategies; each rank writes what it has
seen to ``NAME-RANK.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import Callback, Trainer, TrainingModule, UserError
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from fitting import draw

SAMPLES = 40
VALIDATION_SAMPLES = 22


class Net(TrainingModule):
    """Two linear layers; a sample's first number is its index. ``is_random`` changes all states."""

    def __init__(self, is_random: bool = False, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        layers = [nn.BatchNorm1d(8), nn.Dropout(0.5)] if is_random else [nn.Tanh()]
        self.sequential_module = nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 1))
        draw(self, 0.3)
        self.is_random = is_random
        if is_random:  # a pipeline refuses metrics
            self.metric = MeanMetric()
        self.register_buffer("validated", torch.zeros(()))
        self.seen: dict[str, list[list[int]]] = {"training": [], "validation": [], "test": []}
        self.total_steps: int | None = None

    def on_fit_start(self) -> None:
        rank = torch.tensor(self.global_rank)
        self.gathered = self.all_gather(torch.stack([rank, 2 * rank])).tolist()
        self.gathered.append(self.all_gather(rank).tolist())
        try:
            self.all_gather(torch.ones(self.global_rank))
        except UserError as error:
            self.gathered.append(str(error))

    def _loss(self, stage: str, batch: Any) -> Tensor:
        ids, x, y = batch
        self.seen[stage].append(ids.tolist())
        return mse_loss(self.sequential_module(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.total_steps = self.trainer.total_steps
        loss = self._loss("training", batch)
        self.log("loss", loss, on_epoch=True)
        if self.is_random:
            self.metric.update(loss.detach() + torch.rand(()))
            self.log("metric", self.metric, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss("validation", batch)
        self.log("val_loss", loss)
        self.log("count", float(self.trainer.batch_samples), reduce_fx="sum")
        if self.is_random:
            torch.rand(5)
            self.validated = self.validated + 1
            self.metric.update(loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss("test", batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0]

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)
        return {"optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(sgd, 0.7)}

    def _loader(self, samples: int) -> DataLoader[Any]:
        x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples))
        data = TensorDataset(torch.arange(samples), x, x.sum(1, keepdim=True))
        return DataLoader(data, batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(SAMPLES)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(VALIDATION_SAMPLES)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


class HourPasses(Callback):
    """After a step, a rank's clock is an hour ahead."""

    def __init__(self, after: int, rank: int = 0) -> None:
        self.after, self.rank = after, rank

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.after and trainer.global_rank == self.rank:
            trainer.position.started -= 3600


class StopsAfterValidation(Callback):
    """Asks on rank 1 to stop after the validation that follows step 4."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 4 and trainer.global_rank == 1:
            trainer.stop()


def named_loaders(module: Net) -> dict[str, Any]:
    """Loaders of 22 samples, and of one sample, which only one of two ranks reads."""
    return {"many": module.val_dataloader(), "one": module._loader(1)}


SWEEP: dict[str, Any] = {"lowest": 1e-4, "steps": 30}
LIMITS = {"limit_train_batches": 4, "limit_val_batches": 5, "accumulate_grad_batches": 2}
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "pipeline": {"strategy": "pipeline", "global_batch_size": 16},
    "server": {"strategy": "parameter_server"},
    "time": {
        **{"strategy": "ddp", "max_time": "00:00:30:00", "max_epochs": 500},
        "callbacks": [HourPasses(after=2, rank=1)],
    },
    # In an epoch of 5 steps; the ranks agree on signals after steps 1, 3 and 7.
    "stop": {
        **{"strategy": "ddp", "max_epochs": 4, "val_every_n_steps": 1},
        **{"limit_train_batches": 1.0, "accumulate_grad_batches": 1},
        "callbacks": [StopsAfterValidation()],
    },
}


def main(folder: Path) -> None:
    for name, options in RUNS.items():
        module = Net()
        shared = {"accelerator": "cpu", "devices": 2, "max_epochs": 2}
        named = {"default_root_dir": folder, "run_name": name, "enable_progress_bar": False}
        run = Trainer(**shared | named | LIMITS | options)
        rate = run.find_learning_rate(Net(), **SWEEP) if name == "ddp" else None
        run.fit(module, module.train_dataloader(), named_loaders(module))
        record = {"steps": run.global_step, "metrics": run.metrics, "rate": rate}
        record |= module.seen | {"gathered": module.gathered}
        (folder / f"{name}-{run.global_rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
