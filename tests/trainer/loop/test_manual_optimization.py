"""Optimizers in the hands of the training step."""

import math
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.strategies.gradients import sparse
from tests.conformance.rows import ROUNDING
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import fitting
from manual_subject import SAMPLES, Accumulates, ByHand


def fit(module: ByHand, folder: Path, **options: Any) -> Any:
    return fitting.fit(module, folder, **{"max_epochs": 1, "run_name": None, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class Once(ByHand):
    """Does something in each batch, by default in its only one, and never steps."""

    def __init__(self, batch_size: int = SAMPLES) -> None:
        super().__init__(batch_size=batch_size)
        self.other = nn.Linear(4, 1)
        self.did: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.do(batch)

    def do(self, batch: Any) -> None:
        raise NotImplementedError

    def both(self, batch: Any) -> Tensor:
        """A loss that needs both networks."""
        return mse_loss(self.network(batch[0]) + self.other(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return [SGD(module.parameters(), lr=0.1) for module in (self.network, self.other)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_optimizer_or_a_list(tmp_path, count):
    class Asks(Once):
        def configure_optimizers(self) -> Any:
            return [SGD(self.parameters(), lr=0.5 * (number + 1)) for number in range(count)]

        def do(self, batch: Any) -> None:
            self.did = [self.optimizers()]

    fit(module := Asks(), tmp_path)
    (returned,) = module.did
    assert isinstance(returned, list) is (count > 1)
    rates = [o.param_groups[0]["lr"] for o in (returned if count > 1 else [returned])]
    assert rates == [0.5, 1.0, 1.5][:count]


def test_without_saying_so_nothing_is_done_by_hand(tmp_path):
    class Forgets(ByHand):
        automatic_optimization = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(torch.zeros(()))

    with pytest.raises(RuntimeError, match="in training_step, with automatic_optimization = False"):
        fit(Forgets(), tmp_path)


@pytest.mark.parametrize("is_manual", [True, False])
def test_a_hook_may_not_take_over_steps_nor_optimizers(tmp_path, is_manual):
    class Switches(ByHand):
        def on_train_epoch_start(self) -> None:
            with pytest.raises(TypeError, match="does not support item assignment"):
                self.trainer.optimizers[0] = None
            self.automatic_optimization = is_manual

    module = Switches()
    module.automatic_optimization = not is_manual
    match = r"^Switches.automatic_optimization was replaced when the fit had begun, without effect"
    with pytest.raises(trainer.UserError, match=match):
        fit(module, tmp_path)


def test_without_a_run_there_are_no_optimizers():
    with pytest.raises(RuntimeError, match="ByHand is not being trained"):
        ByHand().optimizers()


def test_steps_are_batches_and_what_is_returned_is_not_used(tmp_path):
    class Returns(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return torch.full((3, 3), float("nan"))

    module = Returns(accumulate=4)
    assert fit(module, tmp_path).global_step == 6
    assert all(weight.isfinite().all() for weight in weights(module).values())


def test_a_weight_that_is_returned_is_not_ignored(tmp_path):
    class Weighs(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return {"weight": 3}

    with pytest.raises(trainer.UserError, match="override count_weight"):
        fit(Weighs(), tmp_path)


def test_a_toggled_model_alone_gets_gradients_and_all_is_as_before_afterwards(tmp_path):
    class Toggles(Once):
        def do(self, batch: Any) -> None:
            self.network[0].bias.requires_grad_(False)
            before = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
            for optimizer in self.optimizers():
                with optimizer.toggle_model():
                    during = {name for name, p in self.named_parameters() if p.requires_grad}
                    self.manual_backward(self.both(batch))
                after = {name: p.requires_grad for name, p in self.named_parameters()}
                having = {name for name, p in self.named_parameters() if p.grad is not None}
                self.did.append((before == after, during, having))
                optimizer.zero_grad()

    fit(module := Toggles(), tmp_path)
    network = {"network.0.weight", "network.2.weight", "network.2.bias"}
    other = {"other.weight", "other.bias"}
    assert module.did == [(True, network, network), (True, other, other)]


def test_an_error_inside_puts_everything_back(tmp_path):
    class Fails(Once):
        def do(self, batch: Any) -> None:
            network, _ = self.optimizers()
            self.other.bias.requires_grad_(False)

            def fail() -> None:
                with network.toggle_model(sync_grad=False):
                    self.did.append(self.trainer.manual.synchronizes)
                    raise ArithmeticError

            with pytest.raises(ArithmeticError):
                fail()
            self.did.append(self.trainer.manual.synchronizes)

    fit(module := Fails(), tmp_path)
    assert module.did == [False, True]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    assert frozen == ["other.bias"]


def test_a_shared_parameter_belongs_to_both(tmp_path):
    class Shares(Once):
        def do(self, batch: Any) -> None:
            for optimizer in self.optimizers():
                with optimizer.toggle_model():
                    self.did.append([parameter.requires_grad for parameter in self.parameters()])

        def configure_optimizers(self) -> Any:
            self.other.requires_grad_(False)
            return [SGD(layers.parameters(), lr=0.1) for layers in (self.network, self.network[0])]

    fit(module := Shares(), tmp_path)
    first, second = [True] * 4 + [False] * 2, [True] * 2 + [False] * 4
    assert module.did == [first, second]


def test_accumulated_batches_equal_one_large_one(tmp_path):
    fit(accumulated := Accumulates(), tmp_path / "accumulated", max_epochs=3)
    fit(large := ByHand(), tmp_path / "whole", max_epochs=3)
    start, trained, wanted = weights(ByHand()), weights(accumulated), weights(large)
    for name, value in wanted.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=ROUNDING)
        assert (value - start[name]).abs().max() > 1e-2


@pytest.mark.parametrize(("value", "algorithm"), [(0.002, "norm"), (0.001, "value")])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_clipping_is_of_one_optimizer_s_gradients(tmp_path, precision, value, algorithm):
    class Clips(Once):
        def do(self, batch: Any) -> None:
            network, other = self.optimizers()
            loss = self.both(batch) * 0.1
            wanted = torch.autograd.grad(loss, other.parameters, retain_graph=True)
            self.manual_backward(loss)
            network.clip_gradients(value, algorithm)
            self.norms = other.clip_gradients(math.inf), other.clip_gradients(1e9)
            gradients = [[p.grad for p in optimizer.parameters] for optimizer in (network, other)]
            self.did = [*gradients, wanted]

    fit(module := Clips(), tmp_path, precision=precision)
    clipped, untouched, wanted = module.did
    expected = torch.nn.utils.get_total_norm(wanted)
    for norm in module.norms:
        torch.testing.assert_close(norm, expected, rtol=1e-2, atol=1e-4)
    for gradient, expected in zip(untouched, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-4)
    if algorithm == "norm":
        norm = torch.stack([grad.norm() for grad in clipped]).norm()
        assert float(norm) == pytest.approx(value, rel=1e-3)
    else:
        assert max(float(grad.abs().max()) for grad in clipped) == pytest.approx(value)
    assert max(float(grad.abs().max()) for grad in untouched) > 5 * value


@pytest.mark.parametrize("count", [1, 2])
def test_schedulers_are_stepped_by_hand_and_not_by_the_trainer(tmp_path, count):
    class Schedules(Once):
        def do(self, batch: Any) -> None:
            self.optimizers()[1].step()
            schedulers = self.lr_schedulers()
            assert isinstance(schedulers, list) is (count > 1)
            if self.global_step % 2 == 0:
                (schedulers if count == 1 else schedulers[0]).step()
            self.did.append(self.optimizers()[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            schedules = [{"scheduler": StepLR(sgd, 1, 0.5)} for sgd in optimizers[:count]]
            return optimizers, [schedule | {"interval": "step"} for schedule in schedules]

    module = Schedules(batch_size=8)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        fit(module, tmp_path)
    assert module.did == [0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]


def test_the_rate_that_is_logged_is_that_of_the_step(tmp_path):
    class Schedules(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.optimizers().param_groups = [self.optimizers().param_groups[0] | {"lr": 0.2}]
            if batch_idx != 1:  # a batch without a step has the next one's
                super().training_step(batch, batch_idx)
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.5)
            return [optimizer], [StepLR(optimizer, 1, 0.5)]

    run = fit(Schedules(batch_size=8), tmp_path, loggers=["csv"], log_every_n_steps=1, max_steps=4)
    assert fitting.logged(run.run_directory, "lr") == [0.5, 0.25, 0.25, 0.2]


def test_rates_are_scaled_in_a_step_and_their_own_before_and_after(tmp_path):
    class Scaled(Once):
        def do(self, batch: Any) -> None:
            optimizer = self.optimizers()[1]
            self.other.weight.grad = torch.ones_like(self.other.weight)
            before = self.other.weight[0, 0].item()
            optimizer.step()
            self.did.append(before - self.other.weight[0, 0].item())
            assert optimizer.param_groups[0]["lr"] == 0.1

    options = {"learning_rate_scaling": "linear", "reference_batch_size": 4}
    fit(module := Scaled(batch_size=8), tmp_path, learning_rate_warmup_steps=4, **options)
    assert module.did == pytest.approx([0.125, 0.15, 0.175, 0.2, 0.2, 0.2], rel=1e-5)


def test_forward_is_in_bf16_and_backward_in_fp32(tmp_path):
    class Half(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            with torch.autocast("cpu", enabled=False):
                plain = self.network(batch[0]).dtype
            self.seen = {"outside": plain, "inside": self.network(batch[0]).dtype}
            super().training_step(batch, batch_idx)

    fit(half := Half(), tmp_path / "half", precision="bf16-mixed")
    fit(full := ByHand(), tmp_path / "full")
    assert half.seen == {"outside": torch.float32, "inside": torch.bfloat16}
    for name, weight in weights(full).items():
        assert 0 < float((weights(half)[name] - weight).abs().max()) < 2e-2


class Scales(ByHand):
    """Two optimizers under a gradient scaler; one's gradients overflow in the third step."""

    def __init__(self) -> None:
        super().__init__(accumulate=2, batch_size=4)
        self.other = nn.Linear(4, 1)
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        network, other = self.optimizers()
        self.scales.append(network._optimization.strategy.precision.scaler.get_scale())
        with network.toggle_model():
            self.manual_backward(self.loss(batch) * 0.1)
        with other.toggle_model():
            factor = 1e38 if batch_idx == 5 else 0.1
            self.manual_backward(self.other(batch[0]).mean() * factor)  # in float16
        if self.ends_step(batch_idx):
            before = weights(self)
            for optimizer in (network, other):
                optimizer.clip_gradients(1.0)
                optimizer.step()
                optimizer.zero_grad()
            for name in ("network.0.weight", "other.weight"):
                same = torch.tensor(before[name].equal(weights(self)[name]))
                self.see(f"{batch_idx}.{name}", same)

    def configure_optimizers(self) -> Any:
        return [SGD(self.network.parameters(), lr=0.1), Adam(self.other.parameters(), lr=0.1)]


def test_an_overflow_skips_the_one_optimizer_and_halves_the_scale_once(tmp_path):
    fit(module := Scales(), tmp_path, precision="16-mixed")
    assert [name for name, same in module.seen.items() if bool(same)] == ["5.other.weight"]
    assert len(module.seen) == 12
    assert module.scales == [2.0**15] * 6 + [2.0**14] * 6


def test_what_the_trainer_cannot_do_for_it(tmp_path):
    class Skips(ByHand):
        may_skip_batches = True

    options = {"gradient_clip_val": 1.0, "log_gradient_norm": True, "nonfinite_loss": "skip"}
    instead = {
        "gradient_clip_val": "call clip_gradients of its optimizers instead",
        "log_gradient_norm": "log what clip_gradients of its optimizers returns",
        "nonfinite_loss='skip'": "do not call step if the loss is not finite on any rank, and use "
        "'stop'",
        "accumulate_grad_batches": "let it step in every n-th batch instead",
        "may_skip_batches": "leave it out, and do not call step",
    }
    refusals = [f"{name}: Skips uses manual optimization; {use}" for name, use in instead.items()]
    of_dp = (
        "strategy='dp' does not support manual optimization, and Skips uses manual optimization: "
        "training_step runs once per replica; use strategy='ddp'"
    )
    for more, lines in (({}, refusals), ({"strategy": "dp"}, [of_dp, *refusals])):
        with pytest.raises(trainer.ConfigurationError) as raised:
            fit(Skips(), tmp_path, accumulate_grad_batches=2, **options, **more)
        assert raised.value.problems == lines


def test_what_is_automatic_may_be_asked_for(tmp_path):
    class Automatic(ByHand):
        automatic_optimization = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    run_of = fit(Automatic(), tmp_path, gradient_clip_val=1.0, accumulate_grad_batches=2)
    assert run_of.global_step == 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_reset_to_none_or_to_zeros(tmp_path, set_to_none):
    gradients: list[Tensor | None] = []

    class Resets(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.zero_grad(set_to_none=set_to_none)
            grad = optimizer.parameters[0].grad
            gradients.append(None if grad is None else grad.clone())

    fit(Resets(), tmp_path)
    assert gradients[0] is None if set_to_none else torch.count_nonzero(gradients[0]) == 0


def test_a_sparse_gradient_waits_in_a_checkpoint_as_it_was_added() -> None:
    waiting = torch.sparse_coo_tensor([[1, 3, 1]], torch.rand(3, 2), (4, 2))
    module = torch.nn.Embedding(4, 2, sparse=True)
    restored = sparse.join_sparse(sparse.split_sparse({"weight": waiting}), module)["weight"]
    # Not [1, 3]: a sum of rows rounds differently when more is added.
    assert restored._indices().tolist() == [[1, 3, 1]]
    assert torch.equal(restored._values(), waiting._values())
