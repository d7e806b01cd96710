"""Averages of the weights: as torch's, the same under every strategy, and resumed exactly."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import my_project_trainer as trainer
import pytest
import test_callbacks
import torch
from my_project_trainer.callbacks import EMA, BestCheckpoint, StochasticWeightAveraging
from my_project_trainer.checkpoint import Checkpoint, resolve
from my_project_trainer.cli import load_weights
from tests.conformance.rows import ROUNDING
from tests.project import run
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import averaging_subject as subject

pytestmark = pytest.mark.usefixtures("apart")

STATE = "EMA"
STEPS = 9  # of eight in an epoch


class Reference(NamedTuple):
    """What one process has computed by hand."""

    model: dict[str, Tensor]
    average: dict[str, Tensor]
    losses: list[float]


def by_hand(batches: Sequence[Any], every: int = 1) -> Reference:
    """Train on batches, with torch's average, and validate with that after every second step."""
    model = subject.Net()

    def average_all(averages: Any, weights: Any, count: Any) -> None:
        decay = min(subject.DECAY, (1 + int(count)) / (10 + int(count)))
        get_ema_multi_avg_fn(decay)(averages, weights, count)

    averaged = AveragedModel(model, multi_avg_fn=average_all)
    optimizer: Any = model.configure_optimizers()
    x, y = subject.validation_data()
    losses = []
    for step, batch in enumerate(batches, 1):
        model.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            averaged.update_parameters(model)
        if step % 2 == 0 or step == len(batches):
            with torch.no_grad():
                losses.append(mse_loss(averaged.module.sequential_module(x), y).item())
    average: Any = averaged.module
    return Reference(model.state_dict(), average.state_dict(), losses)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The batches of nine steps; their order is the same under every strategy."""
    records = subject.Records()
    fit(subject.Net(), records, default_root_dir=tmp_path_factory.mktemp("batches"))
    return records.batches


def fit(model: trainer.TrainingModule, *callbacks: Any, **options: Any) -> trainer.Trainer:
    return test_callbacks.fit(model, *callbacks, **{"max_steps": STEPS} | options)


def saved(name: str) -> dict[str, Any]:
    return Checkpoint(resolve(Path("runs") / name)).state()


def average_of(state: dict[str, Any]) -> dict[str, Tensor]:
    average: dict[str, Tensor] = state["callbacks"][STATE]["average"]
    return average


def check(name: str, expected: Reference, validations: slice = slice(None)) -> None:
    """Compare a run with one process by hand."""
    state = saved(name)
    trained = {key for key in expected.average if not key.startswith("sequential_module.3")}
    assert average_of(state).keys() == trained
    for weight, value in average_of(state).items():
        torch.testing.assert_close(value, expected.average[weight], atol=ROUNDING, rtol=0)
    for weight, value in state["model"].items():
        torch.testing.assert_close(value, expected.model[weight], atol=ROUNDING, rtol=0)
    losses = json.loads(Path(f"{name}.json").read_text())
    assert losses == pytest.approx(expected.losses[validations], abs=ROUNDING)


USED = "weights: the average of EMA, which validations of the fit used; for those of training: "


def test_what_uses_a_checkpoint_uses_the_average_as_validations_do(batches, capsys):
    expected = by_hand(batches)
    subject.fit("single_device", 1, STEPS, "run")
    check("run", expected)
    made = trainer.Trainer(accelerator="cpu", devices=1)
    for averaged, weights in ((True, expected.average), (False, expected.model)):
        tested, loaded = subject.Net(), subject.Net()
        capsys.readouterr()
        loss = made.test(tested, checkpoint="runs/run", averaged=averaged)["val_loss"]
        load_weights(loaded, "runs/run", averaged=averaged)
        assert [text.count(USED) for text in capsys.readouterr()] == [0, 2 * averaged]
        assert (loss == pytest.approx(expected.losses[-1], abs=ROUNDING)) is averaged
        for name, value in weights.items():
            for model in (tested, loaded):
                torch.testing.assert_close(model.state_dict()[name], value, atol=ROUNDING, rtol=0)
    with pytest.raises(trainer.ConfigurationError, match="averaged=False: only for a checkpoint"):
        made.test(subject.Net(), averaged=False)


def test_the_best_checkpoint_has_the_value_for_which_it_was_kept() -> None:
    model, best = subject.Net(), BestCheckpoint("val_loss")
    made = fit(model, EMA(subject.DECAY), best, val_every_n_steps=2)
    for result in (made.validate(model, checkpoint="best"), made.test(model, checkpoint="best")):
        assert result["val_loss"] == pytest.approx(best.kept[0][0], abs=1e-7)


def test_the_mean_of_the_last_epochs_is_torch_s_and_resumes_exactly() -> None:
    records, model, averaged = subject.Records(), subject.Net(), None
    fit(subject.Net(), records, StochasticWeightAveraging(1), max_steps=None, max_epochs=3)
    optimizer: Any = model.configure_optimizers()
    x, y = subject.validation_data()
    expected = []
    for step, batch in enumerate(records.batches, 1):
        model.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 0:
            if step > 8:
                averaged = averaged or AveragedModel(model)
                averaged.update_parameters(model)
            used: Any = model if averaged is None else averaged.module
            expected.append(mse_loss(used.sequential_module(x), y).item())
    assert len(expected) == 3
    assert records.losses == pytest.approx(expected, abs=ROUNDING)

    full, rest, ends = (StochasticWeightAveraging(1) for _ in range(3))
    one, other = subject.Net(), subject.Net()
    epochs = {"max_steps": None, "resume": "auto"}
    fit(one, full, max_epochs=4, run_name="whole", **epochs)
    fit(other, ends, max_epochs=3, run_name="rest", **epochs)
    fit(other, rest, max_epochs=4, run_name="rest", **epochs)
    assert full.count == rest.count == 3
    assert all(torch.equal(full.average[name], rest.average[name]) for name in full.average)


def test_training_is_the_same_as_without_an_average(batches: list[Any]) -> None:
    expected = by_hand(batches, every=3)
    ema, model = EMA(subject.DECAY, every_n_steps=3), subject.Net()
    fit(model, ema, val_every_n_steps=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.model[name])
    for name, value in ema.average.items():
        assert torch.equal(value, expected.average[name])
    with pytest.raises(trainer.ConfigurationError, match="EMA and EMA: validations use one"):
        fit(model, ema, EMA(0.5))


def test_a_second_fit_does_not_continue_the_average_of_the_first() -> None:
    ema = EMA(subject.DECAY)
    for _ in range(2):
        torch.manual_seed(1)
        fit(subject.Net(), ema)
    new = EMA(subject.DECAY)
    torch.manual_seed(1)
    fit(subject.Net(), new)
    assert ema.count == new.count == STEPS
    assert all(torch.equal(ema.average[name], new.average[name]) for name in new.average)


def test_half_precision_is_averaged_in_float32() -> None:
    ema, model = EMA(0.999), subject.Net()
    fit(model, ema, precision="bf16-true")
    name = "sequential_module.0.weight"
    assert model.state_dict()[name].dtype == torch.bfloat16
    assert ema.average[name].dtype == torch.float32
    # bfloat16 has eight bits: it would lose all changes of a thousandth.
    assert not torch.equal(ema.average[name], ema.average[name].bfloat16().float())


class _Infinite(subject.Net):
    """The losses of two of its eight steps are infinite: a gradient scaler skips them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx in (0, 4) else loss


def test_a_skipped_step_does_not_count() -> None:
    ema = EMA(subject.DECAY)
    made = fit(_Infinite(), ema, max_steps=8, precision="16-mixed")
    assert (made.global_step, ema.count) == (8, 6)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        EMA(decay=1.0, every_n_steps=0)
    assert caught.value.problems == [
        "EMA: decay=1.0: give a number from 0 to below 1",
        "EMA: every_n_steps=0: give at least 1",
    ]


def train(*words: str) -> None:
    """Train with two ranks; all in one start."""
    run(["-m", "averaging_subject", "2", *words], cwd=Path.cwd())


def check_exact(uninterrupted: str, resumed: str) -> None:
    one, other = saved(uninterrupted), saved(resumed)
    for weights_of in (lambda state: state["model"], average_of):
        assert weights_of(one).keys() == weights_of(other).keys()
        for name, value in weights_of(one).items():
            assert torch.equal(value, weights_of(other)[name])


@pytest.mark.slow
def test_a_checkpoint_of_ddp_resumes_under_fsdp_exactly(batches: list[Any]) -> None:
    expected = by_hand(batches)
    train("ddp:5:run", f"fsdp:{STEPS}:run", f"fsdp:{STEPS}:whole", "fsdp:5:half")
    check("run", expected, slice(2, None))
    check("whole", expected)
    train(f"fsdp:{STEPS}:half")
    check_exact("whole", "half")
    # Saves copy neither the model nor its average.
    assert json.loads(Path("whole-storages.json").read_text()) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param(("hsdp", "ddp_zero1", "pipeline"), marks=pytest.mark.exhaustive),
        pytest.param(("deepspeed_stage_2",), marks=pytest.mark.needs("deepspeed")),
        pytest.param(
            ("ddp_sharded",), marks=[pytest.mark.needs("fairscale"), pytest.mark.exhaustive]
        ),
    ],
)
def test_each_strategy_averages_like_one_process_and_resumes_exactly(strategies, batches):
    expected = by_hand(batches)
    train(
        *(word for name in strategies for word in (f"{name}:{STEPS}:{name}", f"{name}:5:5-{name}"))
    )
    train(*(f"{name}:{STEPS}:5-{name}" for name in strategies))
    for strategy in strategies:
        check(strategy, expected)
        check_exact(strategy, f"5-{strategy}")
    # Another strategy reads their averages.
    subject.fit("single_device", 1, STEPS + 1, strategies[0])


class ChangesInValidation(subject.Net):
    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self.sequential_module[4].weight.zero_()


def test_a_change_that_the_end_of_a_validation_would_undo_is_refused() -> None:
    module = ChangesInValidation()
    made = trainer.Trainer(max_epochs=1, sanity_check=0, callbacks=[EMA()])
    line = r"sequential_module.4.weight was changed in a validation, in which .* average of EMA"
    with pytest.raises(trainer.UserError, match=line):
        made.fit(module)
    assert module.sequential_module[4].weight.abs().min() > 0  # training's
