"""Everyday programs of public bug reports under several strategies: right, or one line in time.

A strategy on one device creates the same optimizers, shards and wrappers as on several.
"""

import types
from typing import Any

import pytest
import torch
from my_project_trainer import TrainingModule, UserError
from my_project_trainer.launch.output import print_once
from test_public_programs import data, make
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

pytestmark = pytest.mark.usefixtures("apart")


class Line(TrainingModule):
    """Each step subtracts its learning rate, 1 at first, from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.trained: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        self.sgd = torch.optim.SGD(self.layer.parameters(), lr=1.0)
        return self.sgd

    def on_fit_end(self) -> None:
        weight: Any = self.layer.weight
        self.trained += [getattr(weight, "full_tensor", lambda: weight)().item()]


def trained(model: Any, strategy: str, **options: Any) -> float:
    make(strategy=strategy, max_epochs=1, **options).fit(model, data(3))
    return float(model.trained[-1])


class StepsScheduler(Line):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        self.schedule.step()


class KeepsGroups(Line):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.groups = optimizer.param_groups
        return optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        self.groups[0]["lr"] /= 2


SHARDED = pytest.param("ddp_sharded", marks=pytest.mark.needs("fairscale"))


@pytest.mark.parametrize("kind", [StepsScheduler, KeepsGroups])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_zero1", "fsdp", SHARDED])
def test_what_a_module_keeps_of_its_optimizer_has_an_effect(kind: Any, strategy: str) -> None:
    assert trained(kind(), strategy) == -1.75


class Attaches(Line):
    """Attaches code to its optimizer, which halves the rate before or limits weights after it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def before(self, optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    def after(self, *_: Any) -> None:
        with torch.no_grad():
            self.layer.weight.clamp_(min=-0.25)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.what == "before":
            optimizer.register_step_pre_hook(self.before)
        elif self.what == "after":
            optimizer.register_step_post_hook(self.after)
        else:
            optimizer.step = types.MethodType(lambda own, closure=None: None, optimizer)
        return optimizer


ATTACHED = {"before": -0.875, "after": -0.25, "step": 0.0}
NO_EFFECT = "configure_optimizers gave SGD with .*, which has no effect with this strategy: use on_"


@pytest.mark.parametrize("what", ATTACHED)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_code_that_is_attached_to_an_optimizer_runs(what: str, strategy: str) -> None:
    assert trained(Attaches(what), strategy) == ATTACHED[what]


@pytest.mark.parametrize("what", ATTACHED)
@pytest.mark.parametrize("strategy", ["ddp_zero1", SHARDED])
def test_code_that_another_optimizer_would_not_run_is_refused(what: str, strategy: str) -> None:
    with pytest.raises(UserError, match=NO_EFFECT):
        trained(Attaches(what), strategy)


@pytest.mark.needs("deepspeed")
def test_deepspeed_would_undo_what_a_hook_of_the_step_does() -> None:
    assert trained(Attaches("before"), "deepspeed_stage_2") == ATTACHED["before"]
    with pytest.raises(UserError, match=NO_EFFECT):
        trained(Attaches("after"), "deepspeed_stage_2")


class Averages(Line):
    """Has a copy that no optimizer steps, and freezes a layer where optimizers are created."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.frozen = AveragedModel(self.layer), nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.frozen(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        self.frozen.requires_grad_(False)
        return super().configure_optimizers()

    def on_after_optimizer_step(self) -> None:
        self.average.update_parameters(self.layer)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_zero1"])
def test_ranks_wait_for_no_gradient_that_no_optimizer_needs(strategy: str) -> None:
    model = Averages()
    assert trained(model, strategy) == -3.0
    assert model.average.module.weight.item() == -2.0


class Assigns(Line):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def on_train_batch_end(self, *_: Any) -> None:
        self.layer.weight.data = self.made(self.layer.weight.data)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_data_that_a_hook_assigns_is_trained(strategy: str) -> None:
    assert trained(Assigns(lambda values: values.clamp(min=-0.5)), strategy) == -0.5
    assert type(torch.distributed.tensor.DTensor.data) is type(Tensor.data)  # no property any more


class Registers(Line):
    def on_fit_start(self) -> None:
        self.layer.weight.register_hook(lambda gradient: gradient / 4)


class Configures(Line):
    def configure_optimizers(self) -> Any:
        Registers.on_fit_start(self)  # type: ignore[arg-type]
        return super().configure_optimizers()


@pytest.mark.parametrize("kind", [Registers, Configures])
def test_a_hook_of_a_gradient_that_shards_do_not_have_is_refused_after_hooks_too(kind: Any) -> None:
    assert trained(kind(), "ddp") == -0.75
    with pytest.raises(UserError, match=r"layer.weight has a hook of its gradient"):
        trained(kind(), "fsdp")


class Replaces(Line):
    def on_train_epoch_start(self) -> None:
        self.layer.weight = nn.Parameter(torch.ones(1, 1))


@pytest.mark.parametrize("strategy", ["auto", "ddp_zero1"])
def test_a_parameter_that_a_hook_replaces_is_not_left_untrained(strategy: str) -> None:
    with pytest.raises(UserError, match=r"^layer \(parameter weight\) was added after configure_"):
        trained(Replaces(), strategy)


class Tokens(Line):
    """A batch may have no token at all."""

    def count_weight(self, batch: Any) -> float:
        return float(batch[0].sum())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch[0]) + 1.0).sum() / max(1.0, self.count_weight(batch))
        self.log("loss", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("dp", 2)])
def test_a_batch_without_weight_counts_in_no_mean(strategy: str, devices: int) -> None:
    batches = [[torch.ones(2, 1)], [torch.zeros(2, 1)], [torch.ones(2, 1)]]
    made = make(strategy=strategy, devices=devices, max_epochs=1)
    made.fit(Tokens(), batches)
    assert made.metrics["loss_epoch"] == pytest.approx((1.0 + 0.0) / 2)


class Baseline(Line):
    """Each step reads a buffer that the steps before it have changed on this rank."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        target = batch[0].mean() * (1 + self.global_rank)
        optimizer = self.optimizers()
        assert optimizer.step(closure=lambda: self.descend(target)) is target
        optimizer.zero_grad()
        self.mean.mul_(0.5).add_(target)
        assert not optimizer.state or optimizer.defaults["lr"] == 1.0

    def descend(self, target: Tensor) -> Tensor:
        self.manual_backward(((self.layer.weight - target + self.mean) ** 2).mean() / 8)
        return target

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.mean)


def test_buffers_that_ranks_change_stay_their_own() -> None:
    two = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 2}
    options = {**two, "keep_checkpoints": 9, "checkpoint_every_n_steps": 1}
    plain, validated, resumed = Baseline(), Baseline(), Baseline()
    first = make(**options)
    first.fit(plain, data(8))
    make(**two, val_every_n_steps=1).fit(validated, data(8), data(4))
    checkpoint = f"{first.run_directory}/checkpoints/step-00000003"
    make(**options, resume=checkpoint, run_name="again").fit(resumed, data(8))
    for model in (validated, resumed):
        assert torch.equal(model.layer.weight, plain.layer.weight)
    # As both ranks compute it in one process.
    weight, means = torch.zeros(()), torch.zeros(2)
    for _ in range(first.global_step):
        targets = torch.tensor([1.0, 2.0])
        weight -= (weight - targets + means).mean() / 4
        means = means * 0.5 + targets
    torch.testing.assert_close(plain.layer.weight.detach().reshape(()), weight)


class Contrasts(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        spread = torch.arange(1.0, 1 + len(batch[0])) + len(batch[0]) * self.global_rank
        outputs = self.all_gather((self.layer.weight + 1) * spread, sync_grads=True)
        self.log("own", outputs.var())
        return outputs.var()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"own": 1.0, "loss": 1.0, "other": 1.0})


def test_a_loss_of_gathered_tensors_has_the_gradients_of_all_ranks(capfd: Any) -> None:
    alone, together, rate = Contrasts(), Contrasts(), {"max_steps": 1, "global_batch_size": 4}
    print_once.cache_clear()
    make(**rate).fit(alone, data(8), data(4))
    make(strategy="ddp_fork", devices=2, **rate).fit(together, data(8))
    assert alone.layer.weight.item() == pytest.approx(-2 * torch.arange(1.0, 5).var().item())
    torch.testing.assert_close(together.layer.weight, alone.layer.weight)
    assert (
        "note: training and validation log own: one curve shows both; use two names"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_a_module_that_is_sharded_is_refused_by_others_too(strategy: str) -> None:
    model = Line()
    trained(model, "fsdp")
    with pytest.raises(UserError, match=r"^Line is still sharded from a previous fit; create it"):
        make(strategy=strategy).fit(model, data())


def test_a_parameter_server_evaluates_without_a_fit() -> None:
    class Validates(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", self.layer.weight.sum())

    assert make(strategy="parameter_server").validate(Validates(), data()) == {"weight": 0.0}
