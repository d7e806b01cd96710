"""``may_skip_batches``: all ranks skip a batch for which ``training_step`` returns None on one."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.callbacks import EMA
from my_project_trainer.launch.start import run_in_processes
from test_skipping import Noted, check
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import averaging_subject
import fitting
from fitting import draw, saved

BATCHES = 8
ACCUMULATED = "accumulate_grad_batches"
NOTE = "note: epoch 1: batches skipped because training_step returned None: "


class Skips(averaging_subject.Net):
    """Returns None for some batches, by default on every rank."""

    may_skip_batches = True

    def __init__(self, skipped: Collection[int] = (2,), rank: int | None = None) -> None:
        super().__init__()
        self.skipped, self.rank = skipped, rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        if batch_idx in self.skipped and self.rank in (None, self.global_rank):
            return None
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss


class Divided(Skips):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        first, last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.sequential_module = nn.Sequential(first, nn.Tanh(), last)
        draw(self, seed=5)

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        return {"sequential_module.0": ColwiseParallel(), "sequential_module.2": RowwiseParallel()}


def fit(module: Any, folder: Path, **options: Any) -> Any:
    size = {} if ACCUMULATED in options else {"global_batch_size": 4}
    return fitting.fit(module, folder, **{"max_epochs": 1, **size, **options})


def fit_on_two(module: Any, folder: Path, **options: Any) -> None:
    def train() -> str:
        fit(module, folder, devices=2, **options)
        return ""

    run_in_processes("fork", 2, train, {})


Plain = Callable[..., dict[str, Tensor]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Trains with plain torch, on the batches of four samples that one process reads."""
    records = averaging_subject.Records()
    fit(averaging_subject.Net(), tmp_path_factory.mktemp("one"), callbacks=[records])
    assert len(records.batches) == BATCHES

    def train(
        skipped: Collection[int], accumulate: int = 1, module: Any = None
    ) -> dict[str, Tensor]:
        module = module or averaging_subject.Net()
        optimizer = module.configure_optimizers()
        for start in range(0, BATCHES, accumulate):
            kept = [n for n in range(start, start + accumulate) if n not in skipped]
            optimizer.zero_grad()
            for x, y in (records.batches[number] for number in kept):
                (nn.functional.mse_loss(module.sequential_module(x), y) / accumulate).backward()
            if kept:
                optimizer.step()
        return dict(module.state_dict())

    return train


# Of steps of two batches the last, the first, and both.
SKIPPED = (1, 2, 4, 5)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 1e6])
def test_one_process_leaves_batches_out(tmp_path, plain, accumulate, clip):
    options = {ACCUMULATED: accumulate, "gradient_clip_val": clip}
    fit(Skips(SKIPPED), tmp_path, **options)
    check(tmp_path, plain(SKIPPED, accumulate))


def test_a_step_without_batches_is_a_skipped_one(tmp_path: Path, capsys: Any) -> None:
    noted = Noted()
    made = fit(Skips((2, 5, 6)), tmp_path, callbacks=[noted, EMA(0.5)], log_gradient_norm=True)
    assert made.global_step == BATCHES
    assert noted.skipped == [number in (2, 5, 6) for number in range(BATCHES)]
    assert noted.stepped == [1, 2, 4, 5, 8]
    assert NOTE + "3" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "ddp_zero1", "fsdp"),
        pytest.param("ddp_sharded", marks=pytest.mark.needs("fairscale")),
    ],
)
def test_all_ranks_skip_what_one_does(tmp_path, plain, strategy, rank):
    fit_on_two(Skips((2, 5), rank), tmp_path, strategy=strategy)
    check(tmp_path, plain((2, 5)))


@pytest.mark.slow
def test_a_rank_that_skips_before_its_peers_gather_ends_the_run(tmp_path: Path) -> None:
    # Without the comparison, ranks wait for each other until the timeout.
    options = {"unit_parameters": 10, "timeout_seconds": 120}  # expires
    how = {"strategy": "fsdp", "strategy_options": options}
    line = "^ranks use different parameters in a step: rank 1 ends its forward, another rank uses "
    with pytest.raises(trainer.UserError, match=line):
        fit_on_two(Skips((2,), 1), tmp_path, **how)


@pytest.mark.slow
@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize("stage", ["1", "2_offload", "3"])
def test_deepspeed_skips_them_too(tmp_path: Path, plain: Plain, stage: str) -> None:
    module = Skips((2, 5), 1)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1, momentum=0.5)  # type: ignore[method-assign]
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    expected = averaging_subject.Net()
    expected.requires_grad_(True)
    fit_on_two(module, tmp_path, strategy=f"deepspeed_stage_{stage}")
    check(tmp_path, plain((2, 5), module=expected))


@pytest.mark.parametrize("strategy", ["ddp", "ddp_zero1", "fsdp"])
def test_gradients_of_a_step_are_averaged_without_its_skipped_batches(tmp_path, plain, strategy):
    class Halves(Skips):
        batch_size = 2

    fit_on_two(Halves(SKIPPED, 1), tmp_path, strategy=strategy, accumulate_grad_batches=2)
    check(tmp_path, plain(SKIPPED, 2))


def test_tensor_parallelism_skips_them_too(tmp_path: Path, plain: Plain) -> None:
    fit_on_two(Divided((2, 5)), tmp_path, strategy="tensor_parallel")
    check(tmp_path, plain((2, 5), module=Divided()))


def test_devices_of_a_process_skip_together(tmp_path: Path, plain: Plain) -> None:
    class One(Skips):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            is_first = bool(batch[0][0].equal(firsts[batch_idx]))
            return None if batch_idx in (2, 5) and not is_first else loss

    records = averaging_subject.Records()
    fit(averaging_subject.Net(), tmp_path, callbacks=[records])
    firsts = [x[0] for x, _ in records.batches]
    fit(One(()), tmp_path / "dp", strategy="dp", devices=2)
    check(tmp_path / "dp", plain((2, 5)))


def test_a_resume_is_exact(tmp_path: Path) -> None:
    options: dict[str, Any] = {ACCUMULATED: 2, "max_epochs": 2}
    fit(Skips((1, 4)), tmp_path / "whole", **options)
    fit(Skips((1, 4)), tmp_path / "parts", **options, max_steps=1)
    fit(Skips((1, 4)), tmp_path / "parts", **options, resume=str(tmp_path / "parts" / "run"))
    uninterrupted, resumed = (saved(tmp_path / name / "run") for name in ("whole", "parts"))
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


@pytest.mark.parametrize("rank", [0, 1])
def test_values_of_the_other_rank_are_logged(tmp_path: Path, rank: int) -> None:
    """Rank 0, which writes them, may have logged nothing."""

    class Constant(Skips):
        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(name, value * 0 + self.global_rank + 1, **options)

    fit_on_two(Constant((2,), rank), tmp_path, loggers=["csv"], log_every_n_steps=1)
    rows = fitting.rows(tmp_path / "run")
    steps = {step: value for step, _, name, value in rows if name == "loss_step"}
    assert steps == {step: (2.0 - rank if step == 3 else 1.5) for step in range(1, 9)}
    losses = fitting.logged(tmp_path / "run", "loss_epoch")
    assert losses == [pytest.approx((7 * 3 + 2 - rank) / 15)]


def line_of(module: Any, **options: Any) -> str:
    shared = {"accelerator": "cpu", "max_epochs": 1, "devices": 2}
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(**{**shared, **options}).fit(module)
    [line] = caught.value.problems
    return line


AVERAGED = "does not average gradients that are averaged already; use strategy='fsdp'"


@pytest.mark.parametrize(
    ("strategy", "accumulate", "reason"),
    [
        ("pipeline", 1, "its stages run at different times; use strategy='fsdp'"),
        ("pipeline", 2, "its stages run at different times; use strategy='fsdp'"),
        ("parameter_server", 1, "each step needs a gradient of each worker; use strategy='ddp'"),
        pytest.param(
            *("ddp_sharded", 2, f"FairScale {AVERAGED}"), marks=pytest.mark.needs("fairscale")
        ),
        pytest.param(
            *("deepspeed_stage_2", 2, f"ZeRO {AVERAGED}"), marks=pytest.mark.needs("deepspeed")
        ),
    ],
)
def test_strategies_that_cannot_skip_say_why(strategy: str, accumulate: int, reason: str) -> None:
    line = line_of(Skips(), strategy=strategy, accumulate_grad_batches=accumulate)
    what = "may_skip_batches"
    if "pipeline" not in strategy and accumulate > 1:
        what += " with accumulate_grad_batches"
    assert line == f"strategy={strategy!r} does not support {what}, which Skips sets: {reason}"


@pytest.mark.parametrize(
    ("search", "skipped", "line"),
    [
        ("learning_rate", 2, "for batch 2: leave such batches out of the data"),
        ("batch_size", 0, "for the first samples: set batch_size"),
    ],
)
def test_a_search_needs_each_loss(tmp_path: Path, search: str, skipped: int, line: str) -> None:
    made = trainer.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path)
    with pytest.raises(trainer.UserError) as caught:
        getattr(made, f"find_{search}")(Skips((skipped,)))
    assert caught.value.problems == [f"find_{search}: training_step returned None {line}"]
