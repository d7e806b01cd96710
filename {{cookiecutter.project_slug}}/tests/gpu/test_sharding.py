"""fsdp and hsdp on models that are not only linear layers: all is where it is computed."""

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from my_project_trainer.checkpoint import dtensors

from . import device
from .subject import FEATURES, Sequences
from .training import distance, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
WIDTH = 1024
BOUND = 1e-4


class Unusual(Sequences):
    """A metric, a buffer and a parameter without dimensions at the root; wide attention.

    ``places``: types of devices, by kind, of what a step computes with; ``shards``: of the
    attention's parameters, before it gathers them.
    """

    def __init__(self) -> None:
        super().__init__(width=8, depth=0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first = nn.Linear(FEATURES, WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 8, batch_first=True)
            self.last = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.linspace(-1, 1, 4))
        self.error = torchmetrics.MeanSquaredError()
        self.places: dict[str, set[str]] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(x) * self.scale + self.shift

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        before = {dtensors.local(weight).device.type for weight in self.attention.parameters()}
        predicted = self(x)
        self.error(predicted.detach().flatten(), y.flatten())
        self.log("error", self.error)
        self.places = {
            "buffers": {buffer.device.type for buffer in self.buffers()},
            "metrics": {self.error.sum_squared_error.device.type},
            "whole": {self.scale.device.type},
            "shards": before,
        }
        loss = mse_loss(predicted, y) / 20
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return train(folder, "cpu", Unusual(), accelerator="cpu")


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_an_unusual_model_equals_the_cpu(tmp_path, reference, record_property, strategy, offload):
    module = Unusual()
    options = {"strategy": strategy, "strategy_options": {"offload": offload}}
    trained = train(tmp_path, "run", module, **options)
    difference = distance(trained, reference)
    record_property("found", f"{difference:.1e} (bound {BOUND:.0e})")
    assert difference <= BOUND
    here = {device.TYPE}
    shards = {"cpu"} if offload else here
    expected = {"buffers": here, "metrics": here, "whole": here, "shards": shards}
    assert module.places == expected
