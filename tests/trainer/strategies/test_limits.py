"""What strategies do not support, each with a reason and an alternative."""

from typing import Any

import my_project_trainer as trainer
import pytest

ENGINE = pytest.mark.needs("deepspeed")
AVERAGES = {"callbacks": ["EMA"]}
NORM, SKIPS = {"log_gradient_norm": True}, {"nonfinite_loss": "skip"}


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [
        ("dp", {"compile": True}, "compile: replicas are created again"),
        ("ddp2", {"compile": True}, "compile: replicas are created again"),
        ("parameter_server", {"precision": "16-mixed"}, "'16-mixed': a gradient scaler must see"),
        ("parameter_server", {"sync_batchnorm": True}, "sync_batchnorm: workers do not run each"),
        ("parameter_server", AVERAGES, "averages of the parameters (EMA): workers hold weights"),
        ("parameter_server", NORM, "log_gradient_norm: each gradient is a step of its own"),
        ("parameter_server", SKIPS, "nonfinite_loss='skip': optimizers step on the server"),
        pytest.param("deepspeed", NORM, "log_gradient_norm: ZeRO computes it", marks=ENGINE),
        pytest.param("deepspeed", SKIPS, "nonfinite_loss='skip': ZeRO computes", marks=ENGINE),
        pytest.param(
            *("deepspeed_stage_3", AVERAGES, "averages of the parameters (EMA): its engine"),
            marks=ENGINE,
        ),
        pytest.param(
            *("deepspeed_stage_3", {"checkpoint_weights": "trainable"}),
            "checkpoint_weights='trainable': its engine gathers",
            marks=ENGINE,
        ),
    ],
)
def test_a_strategy_says_what_it_does_not_support(
    strategy: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
    (line,) = raised.value.problems
    assert line.startswith(f"strategy={strategy!r} does not support {reason}")
    assert "; use " in line or "; leave " in line
