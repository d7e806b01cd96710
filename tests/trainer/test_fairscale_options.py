"""Units and sharded optimizer states of FairScale's strategies, in one process."""

from typing import Any

import pytest
import torch
from my_project_trainer import TrainingModule, strategies
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.options import Options
from my_project_trainer.strategies.fairscale import parameter_shards
from my_project_trainer.strategies.optimizers import read_optimization
from my_project_trainer.strategies.precision import Precision
from torch import Tensor, nn


class Layers(TrainingModule):
    """Layers of 9 and 4 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.needs("fairscale")
@pytest.mark.parametrize(
    ("smallest", "units"),
    [(1, {"module.first", "module.second"}), (5, {"module.first"}), (1000, set())],
)
def test_units_have_at_least_min_num_params(smallest: int, units: set[str]) -> None:
    from my_project_trainer.strategies.fairscale.fsdp import FairScaleFSDP
    from my_project_trainer.strategies.fairscale.units import named_units

    strategy, module = FairScaleFSDP(min_num_params=smallest), Layers()
    strategy.connect(Layout(), [torch.device("cpu")], Precision("32-true", "cpu"))
    try:
        strategy.setup(module, lambda: read_optimization(module.configure_optimizers()))
        assert strategy._wrapped is not None
        assert set(named_units(strategy._wrapped)) == units
    finally:
        strategy.teardown()


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_step_count_is_not_sharded(
    monkeypatch: pytest.MonkeyPatch, rank: int, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(parameter_shards.collectives, "world_size", lambda: 2)
    monkeypatch.setattr(parameter_shards.collectives, "rank", lambda: rank)
    shard = parameter_shards.Shard(nn.Parameter(torch.zeros(shape)))
    steps = torch.full((1,) if shape == (1,) else (), 5.0)
    found = shard.cut_values({"step": steps, "exp_avg": torch.full(shape, 7.0)})
    assert found["step"].shape == steps.shape
    assert float(found["step"]) == 5.0
    here = [[7.0, 7.0], [7.0, 0.0]] if shape == (3,) else [[7.0], [0.0]]
    assert found["exp_avg"].tolist() == here[rank]


@pytest.mark.needs("fairscale")
@pytest.mark.parametrize(("precision", "lines"), [("32-true", 0), ("bf16-mixed", 1)])
def test_synchronized_batchnorm_needs_float32(precision: str, lines: int) -> None:
    options = Options(sync_batchnorm=True, precision=precision)
    found = strategies.create("fairscale_fsdp", {}).problems(options, None)
    assert len(found) == lines
    assert all(
        "sync_batchnorm is not supported with precision='bf16-mixed'" in each for each in found
    )
