"""What strategies do not support, each with a reason and an alternative."""

import sys

import my_project_trainer as trainer
import pytest

AVERAGES, NORM = {"callbacks": ["EMA"]}, {"log_gradient_norm": True}
SKIPS, TRAINABLE = {"nonfinite_loss": "skip"}, {"checkpoint_weights": "trainable"}
SKIP = "nonfinite_loss='skip': "
ZERO = "inside its step; use strategy='fsdp'"
REFUSED = [
    ("dp", {"compile": True}, "compile: replicas are created again"),
    ("ddp2", {"compile": True}, "compile: replicas are created again"),
    ("parameter_server", {"precision": "16-mixed"}, "'16-mixed': a gradient scaler must see"),
    ("parameter_server", {"sync_batchnorm": True}, "sync_batchnorm: workers do not run each"),
    ("parameter_server", AVERAGES, "averages of the parameters (EMA): workers hold weights"),
    ("parameter_server", NORM, "log_gradient_norm: each gradient is a step of its own"),
    ("parameter_server", SKIPS, f"{SKIP}optimizers step on the server; use strategy='ddp'"),
    ("deepspeed", NORM, f"log_gradient_norm: ZeRO computes it {ZERO}"),
    ("deepspeed", SKIPS, f"{SKIP}ZeRO computes the norm of the gradients {ZERO}"),
    ("deepspeed_stage_3", AVERAGES, "averages of the parameters (EMA): its engine gathers"),
    ("deepspeed_stage_3", TRAINABLE, "checkpoint_weights='trainable': its engine gathers"),
]
MARKS = {"deepspeed": pytest.mark.needs("deepspeed")}


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [pytest.param(*row, marks=MARKS.get(row[0].partition("_")[0], ())) for row in REFUSED],
)
def test_a_strategy_says_what_it_does_not_support(strategy, options, reason):
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
    (line,) = raised.value.problems
    assert line.startswith(f"strategy={strategy!r} does not support {reason}")
    assert "; use " in line or "; leave " in line


@pytest.mark.parametrize(
    ("strategy", "package"),
    [
        ("deepspeed_stage_2", "deepspeed"),
        ("ddp_sharded", "fairscale"),
        ("ddp_sharded_spawn", "fairscale"),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_install_it(monkeypatch, strategy, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1)
    problem = f"strategy={strategy!r} needs the package {package}, which is not installed"
    assert raised.value.problems == [f"{problem}: make {package}, or pip install '.[{package}]'"]
