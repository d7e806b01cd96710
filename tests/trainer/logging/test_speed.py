"""The speed of training, by a clock that only the test moves; and the norm of the gradients."""

from functools import partial
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import psutil
import pytest
import torch
from my_project_trainer.launch import start
from my_project_trainer.logging import progress
from tests.conformance.rows import ROUNDING
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import averaging_subject
import fitting
import logger_subject as subject
from fake_clock import Clock


class Slow(Dataset[Tensor]):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.clock.now += 1
        return torch.tensor([float(index), 1.0])


class Model(fitting.Descends, lr=0.001):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += 6
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 100

    def train_dataloader(self) -> Any:
        return DataLoader(Slow(self.clock), batch_size=2)

    val_dataloader = train_dataloader


fit = partial(fitting.fit, loggers=["csv"])
FIVE: dict[str, Any] = {"global_batch_size": 4, "max_steps": 5, "log_every_n_steps": 2}
PEAK, CHECKPOINT = "speed/peak_memory_mib", "speed/checkpoint_seconds"


def rows(folder: Path, file: str, run_name: str = "run") -> list[tuple[int, str, float]]:
    """The rows of a file, without those of the memory, which no test controls."""
    table = fitting.rows(folder / run_name, file)
    return [(step, name, value) for step, _, name, value in table if name != PEAK]


def validation(count: int) -> dict[str, float]:
    """What is written of so many validations, of six batches."""
    return {"speed/validation_seconds": 600.0 * count + 6.0 * 2 * count}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_speed_of_steps_without_validations_and_checkpoints(tmp_path, clock, accumulate):
    bare = subject.Bare()
    options = {"log_every_n_steps": 2, "val_every_n_steps": 1, "checkpoint_every_n_steps": 1}
    options |= {"loggers": ["csv", bare], "accumulate_grad_batches": accumulate, "max_steps": 5}
    made = fit(Model(clock), tmp_path, **options)
    expected = {
        "speed/seconds_per_step": 8.0 * accumulate,
        "speed/data_wait": 0.25,
        "speed/samples_per_second": 0.25,
    }
    # What follows a step is written with the next one; the last step, when training has ended.
    since = {1: validation(0), 2: validation(1), 4: validation(2), 5: validation(2)}
    by_step = {step: expected | more for step, more in since.items()}
    speeds = [row for row in rows(tmp_path, "speed.csv") if row[1] != CHECKPOINT]
    assert speeds == [(step, *pair) for step, values in by_step.items() for pair in values.items()]
    saves = [row for row in rows(tmp_path, "speed.csv") if row[1] == CHECKPOINT]
    assert saves == [(step, CHECKPOINT, 0.0) for step in (1, 2, 4, 5)]
    kept = [(step, dict(values)) for step, _, values in bare.kept if "speed/data_wait" in values]
    assert all(values.pop(PEAK) > 0 for _, values in kept)
    assert [(step, {**values, CHECKPOINT: 0.0}) for step, values in kept] == [
        (step, {**values, CHECKPOINT: 0.0}) for step, values in by_step.items()
    ]
    names = {name for _, name, _ in rows(tmp_path, "metrics.csv")}
    assert names - {"loss_epoch"} == {"loss", "lr"}
    assert made.metrics.keys() - {"loss_epoch"} == {"loss", "lr"}


def test_no_speed_is_written_twice_after_a_resume(tmp_path: Path, clock: Clock) -> None:
    options = {"log_every_n_steps": 1, "checkpoint_every_n_steps": 2}
    fit(Model(clock), tmp_path, max_steps=5, **options)
    resume = tmp_path / "run" / "checkpoints" / "step-00000004"
    fit(Model(clock), tmp_path, max_steps=6, resume=str(resume), **options)
    waits = [row for row in rows(tmp_path, "speed.csv") if row[1] == "speed/data_wait"]
    assert waits == [(step, "speed/data_wait", 0.25) for step in range(1, 7)]


def test_without_a_batch_size_there_are_no_samples_per_second(clock: Clock) -> None:
    measured = progress.Speed(None)
    clock.now += 8
    assert measured.take(4) == {
        "speed/seconds_per_step": 2.0,
        "speed/data_wait": 0.0,
        "speed/checkpoint_seconds": 0.0,
        "speed/validation_seconds": 0.0,
    }


class Text(Model):
    """Each sample has two tokens, and takes thirty operations."""

    flops_per_sample = 30.0

    def count_tokens(self, batch: Tensor) -> int:
        return batch.numel()


def last_speed(folder: Path) -> dict[str, float]:
    return {name: value for _, name, value in rows(folder, "speed.csv")}


def test_tokens_and_the_part_of_the_peak_that_is_used(tmp_path: Path, clock: Clock) -> None:
    fit(Text(clock), tmp_path, max_steps=4, accumulate_grad_batches=3, peak_flops=10)
    speeds = last_speed(tmp_path)
    assert speeds["speed/samples_per_second"] == 0.25
    assert speeds["speed/tokens_per_second"] == 0.5
    assert speeds["speed/mfu"] == 0.25 * 30 / 10


def test_tokens_are_those_of_all_replicas_and_the_peak_that_of_all_devices(tmp_path, clock):
    options = {"strategy": "ddp_fork", "devices": 2, "max_steps": 2, "peak_flops": 10}
    fit(Text(clock), tmp_path, **options)
    speeds = last_speed(tmp_path)
    assert speeds["speed/samples_per_second"] == 0.5
    assert speeds["speed/tokens_per_second"] == 1.0
    assert speeds["speed/mfu"] == 0.5 * 30 / (2 * 10)


def test_what_cannot_be_computed_is_refused(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", peak_flops=-1)
    assert caught.value.problems == ["peak_flops=-1: expected float > 0 | None"]
    text = Text(clock)
    text.train_dataloader = lambda: [torch.ones(2, 2)]  # type: ignore[method-assign]
    with pytest.raises(trainer.UserError, match="the loader has no batch_size"):
        fit(text, tmp_path, max_steps=1, peak_flops=10)
    text.count_tokens = lambda batch: batch.sum()  # type: ignore[assignment,method-assign]
    with pytest.raises(trainer.UserError, match=r"Text.count_tokens returned .*: return an int"):
        fit(text, tmp_path, max_steps=1, overwrite=True)


def test_the_peak_of_the_memory_is_at_least_what_is_used_now() -> None:
    used = psutil.Process().memory_info().rss / 2**20
    peak = progress.peak_memory(torch.device("cpu"))[PEAK]
    # The kernel adds up the pages of each CPU in batches: both may be off by a fraction of a MiB.
    assert used - 1 <= peak <= psutil.virtual_memory().total / 2**20


def by_hand(model: Model, algorithm: str | None) -> tuple[list[float], list[Tensor]]:
    """Norms of four steps on all samples, before they are clipped to 0.5; and the weights."""
    net = nn.Linear(2, 1)
    net.load_state_dict(model.layer.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    samples = torch.tensor([[float(index), 1.0] for index in range(12)])
    totals = []
    for _ in range(4):
        optimizer.zero_grad()
        net(samples).square().mean().backward()
        totals.append(float(nn.utils.get_total_norm([weight.grad for weight in net.parameters()])))
        if algorithm is not None:
            getattr(nn.utils, f"clip_grad_{algorithm}_")(net.parameters(), 0.5)
        optimizer.step()
    return totals, list(net.parameters())


def norms(folder: Path, run_name: str = "run") -> dict[int, float]:
    lines = rows(folder, "metrics.csv", run_name)
    return {step: value for step, name, value in lines if "norm" in name}


def approximately(expected: list[float]) -> dict[int, Any]:
    """The norms of the steps that are logged."""
    return {step: pytest.approx(expected[step - 1], rel=ROUNDING) for step in (1, 2, 4)}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_norm_of_the_gradients_is_logged_where_clipping_computes_it(tmp_path, clock, algorithm):
    model = Model(clock)
    expected = by_hand(model, "norm")[0]
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    options = {"global_batch_size": 12, "max_steps": 4, "log_every_n_steps": 2}
    fit(model, tmp_path, **clipping, **options)
    assert norms(tmp_path) == (approximately(expected) if algorithm == "norm" else {})


def test_the_norm_is_logged_without_clipping_by_norm(tmp_path: Path, clock: Clock) -> None:
    model = Model(clock)
    expected, weights = by_hand(model, "value")
    clipping = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    options = {"global_batch_size": 12, "max_steps": 4, "log_every_n_steps": 2}
    fit(model, tmp_path, log_gradient_norm=True, **clipping, **options)
    assert norms(tmp_path) == approximately(expected)
    assert all(map(torch.equal, model.parameters(), weights))
    options |= {"precision": "16-mixed", "overwrite": True}
    fit(model, tmp_path, log_gradient_norm=True, **clipping, **options)
    assert norms(tmp_path).keys() == {1, 2, 4}


@pytest.fixture(scope="module")
def norms_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("one")
    fit(averaging_subject.Net(), folder, log_gradient_norm=True, **FIVE)
    return {step: pytest.approx(value, rel=ROUNDING) for step, value in norms(folder).items()}


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "ddp_zero1", "fsdp", "pipeline"),
        pytest.param("ddp_sharded", marks=pytest.mark.needs("fairscale")),
    ],
)
def test_two_ranks_log_the_norm_of_one_process(tmp_path, strategy, norms_of_one_process):
    options = {"strategy": strategy, "devices": 2, "log_gradient_norm": True, **FIVE}
    train = partial(fit, averaging_subject.Net(), tmp_path, **options)
    start.run_in_processes("fork", 2, lambda: str(train()), {})
    assert norms(tmp_path) == norms_of_one_process
    assert norms_of_one_process.keys() == {1, 2, 4, 5}


def test_two_devices_of_a_process_log_the_norm_of_one(tmp_path, norms_of_one_process):
    options = {"strategy": "dp", "devices": 2, "log_gradient_norm": True, **FIVE}
    fit(averaging_subject.Net(), tmp_path, **options)
    assert norms(tmp_path) == norms_of_one_process
