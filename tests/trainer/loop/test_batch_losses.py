"""A loss over the whole batch: dp and ddp2 compute it in ``training_step_end``, and ddp cannot."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conformance.rows import ROUNDING
from tests.project import run_nodes, succeed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, draw, quiet


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


def main(strategy: str, devices: int, global_batch: int, file: Path) -> None:
    """Train, and write the weights."""
    shared = {"global_batch_size": global_batch, "default_root_dir": file.with_suffix("")}
    run = quiet(devices=devices, strategy=strategy, max_epochs=2, **shared)
    module = Contrastive()
    run.fit(module)
    if run.global_rank == 0:
        save_file(module.state_dict(), file)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory):
    """Trains once in each way."""

    @cache
    def trained(strategy: str, devices: int, nodes: int = 1, batch: int = 24) -> dict[str, Tensor]:
        file = tmp_path_factory.mktemp("contrastive-") / "weights.safetensors"
        for done in run_nodes(["-m", __name__, strategy, str(devices), str(batch), file], nodes):
            assert done.returncode == 0, done.stderr
        return load_file(file)

    return trained


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest of any weight."""
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("dp", 2), pytest.param("dp", 3, marks=pytest.mark.slow), ("ddp2", 2)]
)
def test_dp_and_ddp2_see_the_whole_batch(weights, strategy, devices):
    assert difference(weights(strategy, devices), weights("single_device", 1)) < ROUNDING


def test_ddp_compares_a_sample_with_those_of_its_own_process_only(weights, tmp_path):
    # Each process' loss has 12 candidates and not 24: another function, and not a rounding.
    assert difference(weights("ddp", 2), weights("single_device", 1)) > 0.05
    # It is what one process gets that takes each half by itself, and averages.
    in_halves = succeed(["-c", HALVES.format(module=__name__), tmp_path])
    expected = [float(number) for number in in_halves.stdout.split()]
    found = [float(value.double().sum()) for _, value in sorted(weights("ddp", 2).items())]
    assert found == pytest.approx(expected, abs=1e-5)


HALVES = """
import sys
from {module} import Contrastive, trainer

class InHalves(Contrastive):
    def training_step_end(self, outputs):
        halves = [{{name: value.chunk(2)[i] for name, value in outputs.items()}} for i in (0, 1)]
        return sum(super(InHalves, self).training_step_end(half) for half in halves) / 2
module = InHalves()
trainer.Trainer(
    accelerator="cpu", global_batch_size=24, max_epochs=2, loggers=[], enable_progress_bar=False,
    default_root_dir=sys.argv[1],
).fit(module)
print(*(float(value.double().sum()) for _, value in sorted(module.state_dict().items())))
"""


@pytest.mark.slow
def test_ddp2_on_two_nodes_compares_with_its_own_node(weights):
    # 24 a node, as two processes of ddp would have them: the nodes' gradients are averaged.
    assert difference(weights("ddp2", 2, 2, 48), weights("ddp", 2, 1, 48)) < ROUNDING


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
