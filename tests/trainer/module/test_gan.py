"""The adversarial networks that come with the project: two optimizers, manual optimization."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.checkpoint import reading as checkpoint
from tests.project import PACKAGE, ROOT, succeed
from torch.utils.data import DataLoader, TensorDataset

from fitting import logged, quiet
from my_project.tasks.digits import Digits
from my_project.tasks.gan import GAN

STRATEGIES = {"single_device": 1, "ddp": 2, "fsdp": 2}
EPOCHS = 6


def command(name: str, *arguments: str | Path) -> list[str | Path]:
    return ["-m", PACKAGE, name, "--config", ROOT / "configs" / "gan.yaml", *arguments]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Trains under a strategy once; the run's directory."""

    @cache
    def directory(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp("gan-")
        how = ("--trainer.accelerator", "cpu", "--trainer.devices", str(STRATEGIES[strategy]))
        where = ("--trainer.default_root_dir", folder, "--trainer.run_name", strategy)
        words = ("--trainer.strategy", strategy, "--trainer.max_epochs", str(EPOCHS))
        succeed(command("fit", *how, *where, *words, "--trainer.loggers", "[csv]"))
        return folder / strategy

    return directory


@pytest.fixture(scope="module")
def untrained() -> float:
    """The distance of what an untrained generator makes."""
    torch.manual_seed(0)
    alone = trainer.Trainer(accelerator="cpu", devices=1, enable_progress_bar=False)
    return alone.validate(GAN(), Digits(batch_size=64))["val_distance"]


@pytest.mark.parametrize(
    "strategy",
    [
        *("single_device", "ddp"),
        pytest.param("fsdp", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.slow
def test_what_it_generates_comes_close_to_what_is_real(trained, untrained, strategy):
    distances = logged(trained(strategy), "val_distance")
    assert len(distances) == EPOCHS
    assert untrained > 9
    assert distances[0] < untrained
    assert distances[-1] < distances[0] / 3
    assert distances[-1] < untrained / 5
    (attempt,) = json.loads((trained(strategy) / "run.json").read_text())["attempts"]
    assert attempt["layout"]["world_size"] == STRATEGIES[strategy]


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_trained_generator_is_tested(trained, processes):
    options = ("--trainer.accelerator", "cpu", "--trainer.devices", processes)
    tested = succeed(command("test", *options, "--checkpoint", trained("ddp")))
    assert float(tested.stdout.split("test_distance: ")[1].splitlines()[0]) < 3


def test_a_trained_generator_generates(trained):
    alone = trainer.Trainer(accelerator="cpu", devices=1)
    images = torch.cat(alone.predict(GAN(), Digits(batch_size=64), str(trained("ddp"))))
    assert images.shape == (224, 1, 8, 8)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert len(images.flatten(1).unique(dim=0)) == 224


def images(count: int) -> DataLoader[Any]:
    """So many batches of two random images."""
    made = torch.rand(2 * count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(made, torch.zeros(2 * count)), batch_size=2)


@pytest.mark.parametrize(
    ("batches", "accumulate", "steps"), [(4, 2, 2), (5, 2, 3), (1, 2, 1), (5, 3, 2), (3, 1, 3)]
)
def test_both_step_after_so_many_batches_and_at_the_end(tmp_path, batches, accumulate, steps):
    model = GAN(width=4, accumulate=accumulate)
    run_of = quiet(max_epochs=1, default_root_dir=tmp_path)
    run_of.fit(model, images(batches))
    saved = checkpoint.Checkpoint(checkpoint.resolve(run_of.run_directory)).state()["optimizers"]
    for network, optimizer in zip(("generator", "discriminator"), saved, strict=True):
        assert {name.split(".")[0] for name in optimizer["state"]} == {network}
        assert {float(state["step"]) for state in optimizer["state"].values()} == {steps}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_images_are_made_of_the_model_s_own_randomness():
    model = GAN(noise=5, width=4)
    torch.manual_seed(1)
    first, second = (model.generate(3).detach() for _ in range(2))
    assert first.shape == second.shape == (3, 1, 8, 8)
    assert not first.equal(second)
    torch.manual_seed(1)
    assert model.generate(3).equal(first)
    assert 0 <= float(first.min()) < float(first.max()) <= 1
