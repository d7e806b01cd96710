"""``nonfinite_loss="rollback"``: the weights of the newest checkpoint, and the next batches."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer import launch
from my_project_trainer.callbacks import EMA
from my_project_trainer.checkpoint import Checkpoint, resolve
from tests.conformance.rows import ROUNDING
from torch import Tensor, nn

import averaging_subject
from nonfinite_subject import Diverges, Root
from test_skipping import Batches

STEPS = 8


class Spikes(averaging_subject.Net):
    """In some steps, counted from 1, the loss or only its gradient is not finite on a rank."""

    schedules = False

    def __init__(
        self, steps: Collection[int] = (5,), rank: int = 0, what: str = "nan", norm: bool = True
    ) -> None:
        super().__init__()
        self.steps, self.rank, self.what = steps, rank, what
        if norm:
            self.sequential_module.append(nn.BatchNorm1d(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank != self.rank or self.global_step + 1 not in self.steps:
            return loss
        return Root.apply(loss) if self.what == "gradient" else loss * float("nan")

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        adam = torch.optim.AdamW(trained, lr=0.01)
        if not self.schedules:
            return adam
        halved = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": halved, "interval": "step"}}


def fit(module: Any, folder: Path, **options: Any) -> trainer.Trainer:
    shared = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "loggers": []}
    shared |= {"default_root_dir": folder, "run_name": "run", "max_steps": STEPS}
    shared |= {"global_batch_size": 4, "log_every_n_steps": 1, "checkpoint_every_n_steps": 2}
    made = trainer.Trainer(**{**shared, "nonfinite_loss": "rollback", **options})
    made.fit(module)
    return made


def saved(folder: Path) -> Any:
    """The newest checkpoint."""
    return Checkpoint(resolve(folder / "run")).state()


Plain = Callable[..., dict[str, Tensor]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Plain torch on the same batches, without some of the steps."""
    batches = Batches()
    fit(averaging_subject.Net(), tmp_path_factory.mktemp("one"), callbacks=[batches])
    assert len(batches.read) == STEPS

    def train(
        left_out: Collection[int], schedules: bool = False, norm: bool = True
    ) -> dict[str, Tensor]:
        module = Spikes(norm=norm)
        optimizer = module.configure_optimizers()
        for step, (x, y) in enumerate(batches.read, 1):
            if step not in left_out:
                optimizer.param_groups[0]["lr"] = 0.01 * 0.9 ** ((step - 1) * schedules)
                optimizer.zero_grad()
                nn.functional.mse_loss(module.sequential_module(x), y).backward()
                optimizer.step()
        return dict(module.state_dict())

    return train


def check(folder: Path, expected: dict[str, Tensor]) -> None:
    found = saved(folder)["model"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("options", "steps", "left_out"),
    [
        ({}, (5,), (5,)),
        ({}, (6,), (5, 6)),
        ({}, (3, 5, 6, 7), (3, 5, 6, 7)),
        ({"log_every_n_steps": 50}, (5,), (5, 6)),  # found before it is saved
        ({"log_every_n_steps": 50, "checkpoint_every_n_steps": 3}, (4, 7), (4, 5, 6, 7, 8)),
        ({"gradient_clip_val": 1e6}, (5,), (5,)),
        ({"async_checkpoints": True}, (5,), (5,)),
    ],
)
def test_the_steps_since_the_checkpoint_are_left_out(
    tmp_path: Path,
    plain: Plain,
    options: dict[str, Any],
    steps: tuple[int, ...],
    left_out: tuple[int, ...],
) -> None:
    made = fit(Spikes(steps), tmp_path, **options)
    assert made.global_step == STEPS
    check(tmp_path, plain(left_out))


def test_parameters_that_are_not_finite_are_not_saved_but_go_back(
    tmp_path: Path, plain: Plain, capsys: Any
) -> None:
    """The loss of the step is finite, and its gradient is not."""
    fit(Spikes((6,), what="gradient"), tmp_path)
    check(tmp_path, plain((5, 6)))
    [line] = [each for each in capsys.readouterr().err.splitlines() if "warning" in each]
    path = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert line.startswith("warning: parameter sequential_module.")
    assert line.endswith(
        "is not finite (NaN or infinite) on rank 0 after step 6, and is not saved: restored "
        f"weights and optimizers from {path}; training continues with the next batches"
    )


def test_schedules_go_on(tmp_path: Path, plain: Plain) -> None:
    module = Spikes((6,))
    module.schedules = True
    fit(module, tmp_path)
    check(tmp_path, plain((5, 6), schedules=True))
    [group] = saved(tmp_path)["optimizers"][0]["param_groups"]
    assert group["lr"] == pytest.approx(0.01 * 0.9**STEPS)


def test_averages_go_back_too(tmp_path: Path) -> None:
    fit(Spikes(), tmp_path / "rollback", callbacks=[EMA(0.5)])
    fit(Spikes(), tmp_path / "skip", callbacks=[EMA(0.5)], nonfinite_loss="skip")
    back, skipped = (
        next(iter(saved(tmp_path / each)["callbacks"].values())) for each in ("rollback", "skip")
    )
    assert back["count"] == skipped["count"] == STEPS - 1
    for name, value in skipped["average"].items():
        torch.testing.assert_close(back["average"][name], value, atol=ROUNDING, rtol=0)


def test_a_resume_is_exact(tmp_path: Path) -> None:
    fit(Spikes((3, 6)), tmp_path / "whole")
    fit(Spikes((3, 6)), tmp_path / "parts", max_steps=4)
    fit(Spikes((3, 6)), tmp_path / "parts", resume=str(tmp_path / "parts" / "run"))
    whole, resumed = saved(tmp_path / "whole")["model"], saved(tmp_path / "parts")["model"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


FAIRSCALE = pytest.mark.needs("fairscale")


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "ddp_zero1", "fsdp", "pipeline"),
        *(pytest.param(name, marks=FAIRSCALE) for name in ("ddp_sharded", "fairscale_fsdp")),
        *(
            pytest.param(
                f"deepspeed_stage_{stage}",
                marks=[pytest.mark.needs("deepspeed"), pytest.mark.slow],
            )
            for stage in (1, 2, 3)
        ),
    ],
)
def test_two_ranks_go_back_together(tmp_path: Path, plain: Plain, strategy: str) -> None:
    """What only one of them meets: of a pipeline, the one with the last stage."""
    rank = 0 if strategy == "pipeline" else 1
    train = partial(fit, Spikes(rank=rank, norm=False), tmp_path, strategy=strategy, devices=2)
    launch.run_in_processes("fork", 2, lambda: str(train()), {})
    check(tmp_path, plain((5,), norm=False))


def test_the_state_of_a_communication_hook_is_restored(tmp_path: Path) -> None:
    """Otherwise the errors that PowerSGD feeds back would not be finite in any later step."""
    hook = {"communication_hook": "powersgd", "powersgd_start_step": 2}
    options = {"strategy": "ddp", "strategy_options": hook, "devices": 2}
    train = partial(fit, Spikes(rank=1, norm=False), tmp_path, **options)
    launch.run_in_processes("fork", 2, lambda: str(train()), {})
    before, after = (
        Checkpoint(tmp_path / "run" / "checkpoints" / f"step-0000000{step}").state()["model"]
        for step in (6, 8)
    )
    name = "sequential_module.4.weight"
    assert after[name].isfinite().all()
    assert not torch.equal(before[name], after[name])


def test_devices_of_a_process_go_back(tmp_path: Path, plain: Plain) -> None:
    fit(Spikes(norm=False), tmp_path, strategy="dp", devices=2)
    check(tmp_path, plain((5,), norm=False))


def test_a_gradient_scaler_skips_by_itself() -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", precision="16-mixed", nonfinite_loss="rollback")
    assert caught.value.problems == [
        "nonfinite_loss='rollback': with precision='16-mixed' a gradient scaler skips steps whose "
        "gradients are not finite; use 'stop'"
    ]


def test_manual_optimization_goes_back_too(tmp_path: Path) -> None:
    found = []
    for manual in (False, True):
        folder = tmp_path / str(manual)
        torch.manual_seed(0)
        fit(Diverges(step=5, manual=manual), folder, global_batch_size=None)
        found.append(saved(folder)["model"]["linear.weight"])
    assert torch.equal(*found)


def test_gradients_that_are_never_finite_end_the_fit(tmp_path: Path) -> None:
    """Each loss is finite, because each step begins with the weights of the checkpoint."""
    module = Spikes(range(3, 60), what="gradient")
    options = {"max_steps": 60, "max_epochs": 9, "checkpoint_every_n_steps": 1}
    with pytest.raises(trainer.UserError, match="after 3 rollbacks without a good checkpoint in"):
        fit(module, tmp_path, **options)


def test_it_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(trainer.UserError, match="there is no checkpoint yet; "):
        fit(Spikes((2,)), tmp_path)


def test_the_fourth_rollback_without_a_good_checkpoint_ends_the_fit(tmp_path: Path) -> None:
    with pytest.raises(trainer.UserError) as caught:
        fit(Spikes(range(3, 9)), tmp_path, checkpoint_every_n_steps=2, log_every_n_steps=1)
    [line] = caught.value.problems
    assert line.startswith("the loss of step 6 is not finite (NaN or infinite) on rank 0, after 3 ")
    assert line.endswith(
        "rollbacks without a good checkpoint in between; lower the learning rate or set "
        "gradient_clip_val"
    )


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("local_sgd", "its ranks have own weights and optimizers; use strategy='ddp'"),
        ("parameter_server", "optimizers step on the server; use strategy='ddp'"),
    ],
)
def test_strategies_that_cannot_go_back_say_why(strategy: str, reason: str) -> None:
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(accelerator="cpu", devices=2, strategy=strategy, nonfinite_loss="rollback")
    assert raised.value.problems == [
        f"strategy={strategy!r} does not support nonfinite_loss='rollback': {reason}"
    ]
