"""``nonfinite_loss="skip"``: a step whose gradients are not finite is skipped on every rank."""

from functools import partial
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.launch import start
from torch import Tensor, nn

import averaging_subject
import fitting
from fitting import assert_close, saved
from nonfinite_subject import Diverges, Root

SKIPPED = 3
FIVE: dict[str, Any] = {"global_batch_size": 4, "max_steps": 5, "log_every_n_steps": 2}


class Skips(averaging_subject.Net):
    """In the third step, the loss (``what="nan"``) or only its gradient is not finite on a rank."""

    def __init__(self, what: str = "nan", rank: int = 0, batch: int | None = None) -> None:
        super().__init__()
        self.what, self.rank, self.batch = what, rank, batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank != self.rank or self.global_step + 1 != SKIPPED:
            return loss
        if self.batch is not None and batch_idx != self.batch:
            return loss
        return Root.apply(loss) if self.what == "gradient" else loss * float("nan")


class Noted(trainer.Callback):
    def __init__(self) -> None:
        self.skipped: list[bool] = []
        self.stepped: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.stepped.append(trainer.global_step + 1)

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        self.skipped.append(trainer.has_skipped_step())


def fit(module: Any, folder: Path, **options: Any) -> Any:
    return fitting.fit(module, folder, **{"nonfinite_loss": "skip", **FIVE, **options})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights after five steps of plain torch, of which the third is left out."""
    records = averaging_subject.Records()
    fit(averaging_subject.Net(), tmp_path_factory.mktemp("one"), callbacks=[records])
    module = averaging_subject.Net()
    optimizer = module.configure_optimizers()
    for step, (x, y) in enumerate(records.batches, 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(module.sequential_module(x), y).backward()
        if step != SKIPPED:
            optimizer.step()
    assert step == 5
    return dict(module.state_dict())


def check(folder: Path, expected: dict[str, Tensor]) -> None:
    assert_close(saved(folder / "run"), expected)


LINE = "warning: step 3 is skipped, because its gradients are not finite (NaN or infinite); steps"


@pytest.mark.parametrize("what", ["nan", "gradient"])
@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_one_process_leaves_out_the_step(tmp_path, capsys, what, clip, expected):
    # So large that finite gradients are not clipped.
    clipped = {} if clip is None else {"gradient_clip_val": 1e6, "gradient_clip_algorithm": clip}
    noted = Noted()
    fit(Skips(what), tmp_path, callbacks=[noted], **clipped)
    check(tmp_path, expected)
    assert noted.skipped == [False, False, True, False, False]
    assert noted.stepped == [1, 2, 4, 5]
    warned = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert warned == [f"{LINE} skipped so far: 1"]


def test_all_micro_batches_of_the_step_are_left_out(tmp_path, expected):
    class Halves(Skips):
        batch_size = 2

    fit(Halves(batch=5), tmp_path, accumulate_grad_batches=2, **{**FIVE, "global_batch_size": None})
    check(tmp_path, expected)


def test_a_resume_is_exact(tmp_path: Path) -> None:
    fit(Skips(), tmp_path / "whole")
    fit(Skips(), tmp_path / "parts", max_steps=2)
    fit(Skips(), tmp_path / "parts", resume=str(tmp_path / "parts" / "run"))
    uninterrupted, resumed = (saved(tmp_path / name / "run") for name in ("whole", "parts"))
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "ddp_zero1", "fsdp", "pipeline"),
        pytest.param("ddp_sharded", marks=pytest.mark.needs("fairscale")),
    ],
)
def test_two_ranks_skip_together(tmp_path, strategy, expected):
    """Only one of them has it: of a pipeline, the first, which has the last stage and its loss."""
    rank = 0 if strategy == "pipeline" else 1
    train = partial(fit, Skips(rank=rank), tmp_path, strategy=strategy, devices=2)
    start.run_in_processes("fork", 2, lambda: str(train()), {})
    check(tmp_path, expected)


def test_two_devices_of_a_process_skip_together(tmp_path, expected):
    fit(Skips(), tmp_path, strategy="dp", devices=2)
    check(tmp_path, expected)


def test_thirty_in_a_row_end_the_fit(tmp_path: Path, capsys: Any) -> None:
    options = {"max_epochs": 8, "max_steps": None, "global_batch_size": None}
    with pytest.raises(trainer.UserError) as raised:
        fit(Diverges(step=2, ever=True), tmp_path, checkpoint_every_n_steps=30, **options)
    problem = "the gradients of 30 steps in a row, up to step 31, are not finite"
    advice = "lower the learning rate, or resume from an earlier checkpoint"
    assert raised.value.problems == [f"{problem}; {advice}"]
    assert len(capsys.readouterr().err.splitlines()) == 29
    assert all(weight.isfinite().all() for weight in [saved(tmp_path / "run")["linear.weight"]])


def test_a_gradient_scaler_skips_by_itself(tmp_path: Path, capsys: Any) -> None:
    noted = Noted()
    fit(Skips(), tmp_path, callbacks=[noted], precision="16-mixed")
    assert noted.stepped == [1, 2, 3, 4, 5]
    assert noted.skipped[2:] == [True, False, False]
    assert LINE not in capsys.readouterr().err


def test_other_policies_are_refused() -> None:
    with pytest.raises(trainer.ConfigurationError, match="nonfinite_loss='skipp': expected "):
        trainer.Trainer(accelerator="cpu", nonfinite_loss="skipp")
