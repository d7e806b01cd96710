"""The adversarial networks that come with the project: two optimizers, manual optimization."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.checkpoint import reading as checkpoint
from safetensors.torch import load_file
from tests.project import PACKAGE, ROOT, run
from torch.utils.data import DataLoader, TensorDataset

from my_project.tasks.digits import Digits
from my_project.tasks.gan import GAN

STRATEGIES = {"single_device": 1, "ddp": 2, "ddp_spawn": 2, "fsdp": 2}
EPOCHS = 6
STOP, END = 13, 31  # both between two batches that are accumulated, in different epochs


def command(name: str, *arguments: str | Path) -> list[str | Path]:
    """Arguments of a command on the adversarial networks' own config."""
    return ["-m", PACKAGE, name, "--config", ROOT / "configs" / "gan.yaml", *arguments]


def fit(strategy: str, folder: Path, run_name: str, *arguments: str | Path) -> Path:
    """Train; the run's directory."""
    processes = str(STRATEGIES[strategy])
    done = run(
        command(
            "fit",
            *("--trainer.accelerator", "cpu", "--trainer.devices", processes),
            *("--trainer.strategy", strategy, "--trainer.loggers", "[csv]"),
            *("--trainer.default_root_dir", folder, "--trainer.run_name", run_name),
            *arguments,
        )
    )
    assert done.returncode == 0, done.stderr
    return folder / run_name


def rows(directory: Path) -> list[tuple[int, str, float]]:
    """Step, name and value of all that a run has logged."""
    with (directory / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    return [(int(line["step"]), line["name"], float(line["value"])) for line in lines]


# --- training --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Trains under a strategy once; the run's directory."""

    @cache
    def directory(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp("gan-")
        return fit(strategy, folder, strategy, "--trainer.max_epochs", str(EPOCHS))

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
        pytest.param("ddp_spawn", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("fsdp", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.slow
def test_what_it_generates_comes_close_to_what_is_real(trained, untrained, strategy):
    distances = [value for _, name, value in rows(trained(strategy)) if name == "val_distance"]
    assert len(distances) == EPOCHS
    assert untrained > 9
    assert distances[0] < untrained
    assert distances[-1] < distances[0] / 3
    assert distances[-1] < untrained / 5
    (attempt,) = json.loads((trained(strategy) / "run.json").read_text())["attempts"]
    assert attempt["layout"]["world_size"] == STRATEGIES[strategy]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_processes_that_are_spawned_train_the_same(trained):
    assert rows(trained("ddp_spawn")) == rows(trained("ddp"))


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_trained_generator_is_tested(trained, processes):
    options = ("--trainer.accelerator", "cpu", "--trainer.devices", processes)
    tested = run(command("test", *options, "--checkpoint", trained("ddp")))
    assert tested.returncode == 0, tested.stderr
    assert float(tested.stdout.split("test_distance: ")[1].splitlines()[0]) < 3


def test_a_trained_generator_generates(trained):
    alone = trainer.Trainer(accelerator="cpu", devices=1)
    data = Digits(batch_size=64)
    images = torch.cat(alone.predict(GAN(), data, str(trained("ddp"))))
    assert images.shape == (224, 1, 8, 8)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert len(images.flatten(1).unique(dim=0)) == 224


# --- resuming in the middle of an accumulation ------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "single_device",
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_a_stop_between_accumulated_batches_changes_nothing(tmp_path, strategy):
    every = ("--trainer.log_every_n_steps", "1", "--trainer.max_steps")
    whole = fit(strategy, tmp_path, "whole", *every, str(END))
    stopped = fit(strategy, tmp_path, "stopped", *every, str(STOP))
    assert newest(stopped).name.endswith(str(STOP))
    saved = checkpoint.Checkpoint(newest(stopped))
    kept = (
        saved.own(0)
        if strategy != "fsdp"
        else {f"gradients/{key}" for key in saved.state()["gradients"]}
    )
    assert any(key.startswith("gradients/generator.") for key in kept)
    assert any(key.startswith("gradients/discriminator.") for key in kept)
    resumed = fit(strategy, tmp_path, "stopped", *every, str(END), "--trainer.resume", stopped)
    assert resumed == stopped
    assert rows(whole) == rows(resumed)
    assert len([name for _, name, _ in rows(whole) if name == "g_loss"]) == END
    ours, theirs = tensors(newest(whole)), tensors(newest(resumed))
    assert ours.keys() == theirs.keys()
    gradients = [key for key in ours if "/gradients/" in key]
    # Each process' own, or what all have parts of.
    where = {"gradients"} if strategy == "fsdp" else set("01"[: STRATEGIES[strategy]])
    assert {key.split("/")[1] for key in gradients} == where
    assert [key for key in ours if not ours[key].equal(theirs[key])] == []


def newest(directory: Path) -> Path:
    """The newest checkpoint of a run."""
    found: Path = checkpoint.resolve(directory)
    return found


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds of weights, optimizers, random states, gradients of each rank."""
    files = sorted(directory.glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


# --- in one process --------------------------------------------------------------------------


def images(count: int) -> DataLoader[Any]:
    """So many batches of two random images."""
    made = torch.rand(2 * count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(made, torch.zeros(2 * count)), batch_size=2)


@pytest.mark.parametrize(
    ("batches", "accumulate", "steps"), [(4, 2, 2), (5, 2, 3), (1, 2, 1), (5, 3, 2), (3, 1, 3)]
)
def test_both_step_after_so_many_batches_and_at_the_end(tmp_path, batches, accumulate, steps):
    model = GAN(width=4, accumulate=accumulate)
    run_of = trainer.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        loggers=[],
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    run_of.fit(model, images(batches))
    saved = checkpoint.Checkpoint(newest(run_of.run_directory)).state()["optimizers"]
    for network, optimizer in zip(("generator", "discriminator"), saved, strict=True):
        assert {name.split(".")[0] for name in optimizer["state"]} == {network}
        assert {float(each["step"]) for each in optimizer["state"].values()} == {steps}
    assert all(each.requires_grad for each in model.parameters())
    assert all(each.grad is None for each in model.parameters())


def test_images_are_made_of_the_model_s_own_randomness():
    model = GAN(noise=5, width=4)
    torch.manual_seed(1)
    first, second = (model.generate(3).detach() for _ in range(2))
    assert first.shape == second.shape == (3, 1, 8, 8)
    assert not first.equal(second)
    torch.manual_seed(1)
    assert model.generate(3).equal(first)
    assert 0 <= float(first.min()) < float(first.max()) <= 1
