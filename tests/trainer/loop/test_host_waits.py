"""Steps of single strategies in which the host would wait for a GPU, or walk over all modules."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from my_project_trainer.strategies.deepspeed import onebit_adam
from my_project_trainer.strategies.deepspeed.deepspeed import DeepSpeed
from my_project_trainer.strategies.fsdp.fsdp import FSDP
from my_project_trainer.strategies.model_parallel.pipeline.strategy import Sequential
from my_project_trainer.strategies.replicated import dp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def no_values_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would have to end its work for raises."""

    def waits(tensor: Tensor, *_: Any) -> Any:
        raise AssertionError("the host waits for a tensor's value")

    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, waits)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group in which nothing travels."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks", "no_values_on_the_host")
def test_one_bit_adam_s_averages_are_not_waited_for():
    tensor = torch.randn(3, 7)
    errors = onebit_adam.CompressionErrors(tensor)
    assert onebit_adam.compressed_average(tensor, errors).shape == (3, 7)


def test_deepspeed_s_gradients_are_clipped_by_value_where_they_are(request):
    strategy = DeepSpeed()
    gradients = [
        torch.tensor([3.0, -5.0, 0.5]),
        torch.tensor([3.0, math.inf]),
        torch.tensor([math.nan, -9.0]),
        torch.tensor([9.0, 1.0], dtype=torch.bfloat16),
    ]
    strategy.zero = SimpleNamespace(loss_scale=2.0)
    strategy.slices = SimpleNamespace(gradients=lambda: gradients, are_offloaded=False)
    with pytest.MonkeyPatch.context():
        request.getfixturevalue("no_values_on_the_host")
        strategy.clip(None, 1.0, "value")
        request.getfixturevalue("monkeypatch").undo()
    assert gradients[0].tolist() == [2.0, -2.0, 0.5]
    assert gradients[1].tolist() == [3.0, math.inf]  # for DeepSpeed to see
    assert math.isnan(gradients[2][0])
    assert gradients[2][1] == -9.0
    assert gradients[3].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.usefixtures("two_ranks")
def test_a_pipeline_s_gradients_are_clipped_without_waiting(algorithm, request):
    strategy = Sequential()
    strategy.ownership = SimpleNamespace(counts_here=lambda _: True)
    strategy.processes = SimpleNamespace(replica=0)
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.tensor([3.0, 4.0])  # the other is not used
    with pytest.MonkeyPatch.context():
        request.getfixturevalue("no_values_on_the_host")
        norm = strategy.clip(SimpleNamespace(parameters=parameters), 1.0, algorithm)
        request.getfixturevalue("monkeypatch").undo()
    if algorithm == "norm":
        assert float(norm) == pytest.approx(5.0)
        assert parameters[0].grad.tolist() == pytest.approx([0.6, 0.8])
    else:
        assert norm is None
        assert parameters[0].grad.tolist() == [1.0, 1.0]


def test_fsdp_tells_its_units_where_it_changes_alone():
    told: list[bool] = []

    class Root(FSDPModule):
        def set_requires_gradient_sync(self, synchronize: bool, **_: Any) -> None:
            told.append(synchronize)

    strategy = FSDP()
    strategy.roots, strategy._synchronizes = [object.__new__(Root)], True
    for synchronize in (True, False, False, True, True):
        strategy._set_gradient_sync(synchronize)
    assert told == [False, True]


def test_dp_sends_sizes_and_numbers_without_waiting(monkeypatch):
    sent: list[Any] = []

    def note(tensor: Tensor, device: torch.device) -> Tensor:
        sent.append((tensor.tolist(), str(device)))
        return tensor

    monkeypatch.setattr(dp.moving, "to_async", note)
    device = torch.device("cpu")
    step = dp.ReplicatedStep(nn.Module(), [device, device])
    step.counts = [3.0, 1.0]
    assert step.read_loss(torch.tensor([1.0, 5.0])) == 2.0
    assert dp.gather([1.5, 2.5], device).tolist() == [1.5, 2.5]
    assert sent == [([3.0, 1.0], "cpu"), ([1.5, 2.5], "cpu")]
