"""What a run holds on the GPU: in steps, while it saves, and at the largest batch that fits."""

from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.memory import activation_checkpointing
from tests.conformance.matrix import PORTABLE
from tests.gpu import device
from tests.gpu.strategies import needing, shards_parameters
from tests.gpu.training import train
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
WIDTH = 1024 if device.IS_GPU else 32
STEPS = 8
# Steps from here on save.
SAVES_FROM = 5
MIB = 2**20


class Deep(trainer.TrainingModule):
    """Many linear layers and few activations.

    ``held``: bytes that a forward leaves for backward; ``peaks``: before any save, and since.
    """

    def __init__(self, depth: int, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.held = 0
        self.peaks: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == SAVES_FROM - 1:
            self.peaks.append(device.peak())
        if batch_idx in (2, SAVES_FROM - 1):
            device.forget_peak()
        before = device.allocated()
        (x,) = batch
        for layer in self.layers:
            x = x + layer(x).tanh() / len(self.layers)
        self.held = device.allocated() - before
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=1e-4)
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(2 * STEPS, WIDTH)), batch_size=2)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("single_device", {}), ("ddp", {}), ("fsdp", {}), ("fsdp", {"offload": True})],
    ids=["single_device", "ddp", "fsdp", "fsdp-offload"],
)
def test_a_save_takes_no_memory_of_the_gpu(
    tmp_path, record_property, strategy, options, asynchronous
):
    module = Deep(16 if device.IS_GPU else 4, "adam")
    train(
        *(tmp_path, "run", module),
        strategy=strategy,
        strategy_options=options,
        async_checkpoints=asynchronous,
        # Step 5 is saved, and step 6 runs while that is written.
        checkpoint_every_n_steps=SAVES_FROM,
        max_steps=STEPS,
    )
    device.only_a_gpu_shows("its memory")
    (without,), since = module.peaks, device.peak()
    record_property("found", f"{since / without - 1:+.1%} (bound +5%)")
    assert since <= 1.05 * without


# Stages of a pipeline are never whole, and need a sequential_module.
GATHERING = [name for name in PORTABLE if shards_parameters(name) and name != "sequential"]


@pytest.mark.parametrize("strategy", needing(GATHERING))
def test_bf16_mixed_keeps_no_copy_of_all_weights_for_backward(tmp_path, record_property, strategy):
    module = Deep(64 if device.IS_GPU else 4)
    half = sum(2 * parameter.numel() for parameter in module.parameters())
    train(*(tmp_path, "run", module), strategy=strategy, precision="bf16-mixed", max_steps=3)
    device.only_a_gpu_shows("its memory")
    record_property("found", f"{module.held / half:.0%} of the weights (bound 50%)")
    assert module.held < 0.5 * half


class Hungry(Descends):
    """Takes some MiB a sample; in a dry run it says that there is no memory for more than 37."""

    SAMPLES, MOST = 1000, 37

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        if not device.IS_GPU and len(x) > self.MOST:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (x.expand(len(x), MIB if device.IS_GPU else 1) * self.scale).tanh().square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(self.SAMPLES, 1)), batch_size=1)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_the_largest_batch_that_fits_is_found(tmp_path, record_property, precision):
    def fit(batch: int) -> None:
        train(tmp_path, f"run-{batch}", Hungry(), global_batch_size=batch, **shared)

    shared = {"precision": precision, "max_steps": 2}
    with device.memory_limited_to(512 * MIB):
        place = {"accelerator": device.ACCELERATOR, "default_root_dir": tmp_path}
        run = quiet(**place, precision=precision)
        size = run.find_batch_size(Hungry())
        record_property("found", f"{size} samples in 512 MiB")
        fit(size * 4 // 5)  # what else a process holds may differ a little
        with pytest.raises(torch.OutOfMemoryError):
            fit(2 * size)
    assert 1 < size < Hungry.SAMPLES
    if not device.IS_GPU:
        assert size == Hungry.MOST


def test_activations_are_computed_again_in_less_memory(record_property):
    peaks, gradients = [], []
    for names in ([], ["0", "1", "2"]):
        torch.manual_seed(0)
        blocks = (
            (nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 8)) for _ in range(3)
        )
        network = nn.Sequential(*(nn.Sequential(*block) for block in blocks)).to(device.DEVICE)
        batch = torch.randn(100_000 if device.IS_GPU else 10, 8, device=device.DEVICE)
        device.forget_peak()
        with activation_checkpointing.applied(network, names):
            network(batch).square().mean().backward()
        peaks.append(device.peak())
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(map(torch.equal, *gradients))
    device.only_a_gpu_shows("its memory")
    record_property("found", f"{peaks[1] / peaks[0]:.0%} of the peak (bound 80%)")
    assert peaks[1] < 0.8 * peaks[0]
