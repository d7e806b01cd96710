"""A loss over the whole batch: dp and ddp2 compute it in ``training_step_end``, and ddp cannot."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from tests.conformance.rows import ROUNDING
from tests.project import run_nodes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, draw, saved


class Contrastive(Descends, lr=0.1, momentum=0.9):
    """Two views of a sample shall lie nearer to each other than to any other sample of the batch.

    InfoNCE: van den Oord et al. 2018, https://arxiv.org/abs/1807.03748.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        draw(self)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, other = batch
        return {"x": self.network(x), "other": self.network(other)}

    def training_step_end(self, outputs: dict[str, Tensor]) -> Tensor:
        x, other = (normalize(outputs[name], dim=1) for name in ("x", "other"))
        return cross_entropy(x @ other.T / 0.2, torch.arange(len(x)))

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(96, 6, generator=generator)
        noise = torch.randn(96, 6, generator=generator) * 0.1
        return DataLoader(TensorDataset(x, x + noise), batch_size=24)


class InHalves(Contrastive):
    """Takes each half of a batch by itself, and averages."""

    def training_step_end(self, outputs: dict[str, Tensor]) -> Tensor:
        halves = ({name: tensor.chunk(2)[i] for name, tensor in outputs.items()} for i in (0, 1))
        return sum(map(super().training_step_end, halves)) / 2


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def trained(
        strategy: str, devices: int, nodes: int = 1, batch: int = 24, kind: str = "Contrastive"
    ) -> dict[str, Tensor]:
        folder = tmp_path_factory.mktemp("contrastive-")
        run = {"name": "run", "module": f"{__name__}.{kind}", "max_epochs": 2, "devices": devices}
        run |= {"strategy": strategy, "global_batch_size": batch, "default_root_dir": str(folder)}
        for done in run_nodes(["-m", "fitting", folder, json.dumps([run])], nodes):
            assert done.returncode == 0, done.stderr
        return saved(folder / "run")

    return trained


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("dp", 2), pytest.param("dp", 3, marks=pytest.mark.slow), ("ddp2", 2)]
)
def test_dp_and_ddp2_see_the_whole_batch(weights, strategy, devices):
    assert difference(weights(strategy, devices), weights("single_device", 1)) < ROUNDING


@pytest.mark.slow
def test_ddp_compares_a_sample_with_those_of_its_own_process_only(weights):
    # Each process' loss has 12 candidates and not 24: another function, and not a rounding.
    assert difference(weights("ddp", 2), weights("single_device", 1)) > 0.05
    assert difference(weights("ddp", 2), weights("single_device", 1, kind="InHalves")) < 1e-5


@pytest.mark.slow
def test_ddp2_on_two_nodes_compares_with_its_own_node(weights):
    # 24 a node, as two processes of ddp would have them: the nodes' gradients are averaged.
    assert difference(weights("ddp2", 2, 2, 48), weights("ddp", 2, 1, 48)) < ROUNDING
