"""What autocast computes in, and the scaler of fp16."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from .project import load

precision = load("trainer.precision")
ConfigurationError = load("trainer.errors").ConfigurationError


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.bfloat16),
        ("16-mixed", torch.float16),
    ],
)
def test_a_product_is_computed_in(name: str, dtype: torch.dtype) -> None:
    found = precision.Precision(name, "cpu")
    with found.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32
    assert (found.scaler is not None) is (name == "16-mixed")


def test_every_name_can_be_made() -> None:
    assert precision.NAMES == ("32-true", "bf16-mixed", "16-mixed")
    assert [precision.Precision(name, "cpu").name for name in precision.NAMES] == list(
        precision.NAMES
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("bf16-mixd", "precision='bf16-mixd' is unknown; did you mean 'bf16-mixed' or '16-mixed'?"),
        ("double", "precision='double' is unknown; known: 16-mixed, 32-true, bf16-mixed"),
    ],
)
def test_an_unknown_name_is_refused(name: str, line: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        precision.Precision(name, "cpu")
    assert raised.value.problems == [line]


def make(
    gradient: float, name: str = "16-mixed"
) -> tuple[nn.Parameter, SGD, "precision.Precision"]:
    """A parameter of 1 after the backward of a loss with this gradient."""
    parameter = nn.Parameter(torch.ones(1))
    found = precision.Precision(name, "cpu")
    found.scale((parameter * gradient).sum()).backward()
    return parameter, SGD([parameter], lr=1.0), found


def test_without_a_scaler_a_loss_is_itself() -> None:
    parameter, optimizer, found = make(0.25, "bf16-mixed")
    loss = torch.ones(1)
    assert found.scale(loss) is loss
    found.unscale(optimizer)
    assert float(parameter.grad) == 0.25
    found.step(optimizer)
    found.update()
    assert parameter.item() == 0.75
    assert found.state() == {}


@pytest.mark.parametrize("clipped", [False, True])
def test_scaled_gradients_step_at_their_own_size(clipped: bool) -> None:
    parameter, optimizer, found = make(0.25)
    assert float(parameter.grad) == 0.25 * 65536
    if clipped:
        found.unscale(optimizer)
        assert float(parameter.grad) == 0.25
    found.step(optimizer)
    found.update()
    assert parameter.item() == 0.75
    assert found.state()["_growth_tracker"] == 1


def test_a_gradient_that_overflowed_is_not_stepped_and_halves_the_scale() -> None:
    parameter, optimizer, found = make(float("inf"))
    found.step(optimizer)
    found.update()
    assert parameter.item() == 1.0
    assert found.state()["scale"] == 32768.0


def test_the_scaler_s_state_comes_back() -> None:
    _, optimizer, found = make(float("inf"))
    found.step(optimizer)
    found.update()
    other = precision.Precision("16-mixed", "cpu")
    other.load_state(found.state())
    assert other.state() == found.state()
    assert float(other.scale(torch.ones(1))) == 32768.0


def test_a_run_of_another_precision_starts_with_a_new_scaler() -> None:
    scaled, plain = precision.Precision("16-mixed", "cpu"), precision.Precision("32-true", "cpu")
    scaled.load_state(plain.state())
    assert scaled.state()["scale"] == 65536.0
    plain.load_state(scaled.state())
    assert plain.state() == {}
