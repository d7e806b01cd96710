"""Compiled steps, the same bits twice, and a whole run of the command on the GPU."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import my_project_trainer as trainer

from ..project import fit, succeed
from . import device
from .strategies import BOUNDS, options
from .subject import Sequences
from .training import distance, is_same, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


class Images(trainer.TrainingModule):
    """Convolutions, norms over the batch, an embedding and dropout, on random images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kinds = nn.Embedding(10, 3)
        self.network = nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        )
        self.head = nn.Linear(32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, kind = batch
        features = self.network(x + self.kinds(kind)[..., None, None])
        predicted = self.head(features.mean((2, 3)))
        loss = mse_loss(predicted, x.mean((1, 2, 3))[:, None])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(160, 3, 16, 16, generator=generator)
        kind = torch.randint(10, (160,), generator=generator)
        return DataLoader(TensorDataset(x, kind), batch_size=32)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_same_run_twice_has_the_same_bits(tmp_path, precision):
    shared = {"precision": precision, "deterministic": True}
    once, again = (train(tmp_path, name, Images(), **shared) for name in ("once", "again"))
    assert is_same(once, again)
    other = train(tmp_path, "other", Images(), **shared, seed=1)
    assert not is_same(once, other)


@pytest.mark.slow
@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("single_device", "32-true"),
        ("single_device", "bf16-mixed"),
        ("ddp", "32-true"),
        ("fsdp", "32-true"),
    ],
)
def test_a_compiled_step_equals_an_eager_one(tmp_path, record_property, strategy, precision):
    shared = {**options(strategy), "precision": precision}
    eager = train(tmp_path, "eager", Sequences(), **shared)
    compiled = train(tmp_path, "compiled", Sequences(), **shared, compile=True)
    difference, bound = distance(eager, compiled), BOUNDS[precision]
    record_property("found", f"{difference:.1e} (bound {bound:.0e})")
    assert difference <= bound


def test_the_command_trains_the_digits(tmp_path):
    pytest.importorskip("sklearn", reason="the digits need scikit-learn, which is not installed")
    short = ["--trainer.accelerator", device.ACCELERATOR, "--trainer.devices", "1"]
    short += ["--trainer.max_epochs", "4", "--trainer.loggers", "[csv]"]
    where = ["--trainer.run_name", "run", "--trainer.default_root_dir", tmp_path]
    succeed(fit(*short, *where), fresh=device.IS_GPU)
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert attempt["device"] == str(device.DEVICE)
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1:]
    values = {row.split(",")[2]: float(row.split(",")[3]) for row in rows}
    assert values["val_accuracy"] > 0.85
