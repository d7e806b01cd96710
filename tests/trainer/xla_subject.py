"""Trains on XLA's CPU device, and prints as JSON what the tests compare.

Started by the tests: ``python -m xla_subject COMMAND FOLDER DEVICES``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

SAMPLES, BATCH = 96, 8
STEPS = SAMPLES // BATCH


def data(samples: int = SAMPLES) -> DataLoader[Any]:
    """The same samples in each process."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)


class Net(trainer.TrainingModule):
    """Dropout draws from the device's generator; a metric has a state on the device."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)
        )
        self.mean = MeanMetric()
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
        self.counts: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from torch_xla.debug import metrics

        names = ("CompileTime", "TransferFromDeviceTime")
        counters = [metrics.metric_data(name) for name in names]
        self.counts.append([metric[0] if metric else 0 for metric in counters])
        x, y = batch
        loss = mse_loss(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.mean.update((self.layers(x) - y).abs())
        self.log("error", self.mean)
        self.log("val_loss", mse_loss(self.layers(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        predictions: Tensor = self.layers(x)
        return predictions

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=0.01)
        decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


def made(folder: str, devices: int, **options: Any) -> trainer.Trainer:
    """A trainer with the strategy, on XLA's CPU device."""
    shared = {"strategy": "xla", "accelerator": "cpu", "devices": devices, "max_epochs": 2}
    shared |= {"enable_progress_bar": False, "loggers": [], "default_root_dir": folder}
    shared |= {"log_every_n_steps": 1000, "global_batch_size": BATCH}
    return trainer.Trainer(**{**shared, **options})


def weights(module: nn.Module) -> list[float]:
    return [value for p in module.parameters() for value in p.detach().cpu().flatten().tolist()]


def steps(folder: str, devices: int) -> Any:
    """How many graphs were compiled, and tensors read by the host, before each step."""
    net = Net()
    made(folder, devices, run_name="steps").fit(net, data())
    return net.counts


def accumulated(folder: str, devices: int) -> Any:
    """The same with two micro-batches per step, clipping, and values that are read now and then."""
    net = Net()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "log_every_n_steps": 3}
    made(folder, devices, run_name="accumulated", **options).fit(net, data())
    return net.counts


def resumed(folder: str, devices: int) -> Any:
    """Weights of a run with dropout, and of one that was stopped and resumed."""
    uninterrupted, other = Net(), Net()
    made(folder, devices, run_name="whole").fit(uninterrupted, data())
    stopped = made(folder, devices, run_name="stopped", max_steps=5)
    stopped.fit(Net(), data())
    made(folder, devices, run_name="stopped", resume=str(stopped.run_directory)).fit(other, data())
    without = Net(dropout=0.0)
    made(folder, devices, run_name="without").fit(without, data())
    return [weights(net) for net in (uninterrupted, other, without)]


def evaluated(folder: str, devices: int) -> Any:
    """Metrics and predictions of samples that do not divide by the processes."""
    net, rest = Net(), data(30)
    fitting = made(folder, devices)
    values = fitting.validate(net, rest)
    predictions = fitting.predict(net, rest)
    predicted = torch.cat([prediction.cpu() for prediction in predictions])[:, 0]
    return [values["error"], values["val_loss"], predicted.tolist()]


def refused(folder: str, devices: int) -> Any:
    """Lines of what this machine, or XLA, does not support."""

    class Words(Net):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(3, 2, sparse=True)

    def line(work: Any) -> list[str]:
        try:
            work()
        except trainer.ConfigurationError as error:
            return error.problems
        return []

    return [
        line(lambda: made(folder, devices, accelerator="tpu")),
        line(lambda: made(folder, devices, precision="16-mixed")),
        line(lambda: made(folder, devices, compile=True)),
        line(lambda: made(folder, devices).find_batch_size(Net(), data())),
        line(lambda: made(folder, devices).fit(Words(), data())),
        "torch_xla" in sys.modules,
    ]


ALL = (steps, accumulated, resumed, evaluated, refused)
COMMANDS = {command.__name__: command for command in ALL}

if __name__ == "__main__":
    name, folder, devices = sys.argv[1:]
    result = COMMANDS[name](folder, int(devices))
    rank = int(os.environ.get("RANK", "0"))
    Path(folder, f"{name}-{rank}.json").write_text(json.dumps(result))
