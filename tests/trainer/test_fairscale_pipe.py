"""FairScale's Pipe computes what one device computes, and says where it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer import Trainer
from my_project_trainer.errors import ConfigurationError
from tests.project import missing, require, run
from torch import nn

from pipe_subject import Net
from processes import at_root

pytest.importorskip("my_project_trainer.strategies.fairscale.checks", reason="folder was deleted")


def test_it_computes_what_one_device_computes(tmp_path: Path) -> None:
    require(missing("fairscale"))
    done = run(["-m", "pipe_subject", tmp_path], extra=at_root(), engine="fairscale")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # Threads of a pipeline have ended, and the user's layers and their forward are back.
    assert (found.pop("threads"), found.pop("own forward"), found.pop("kind")) == (
        0,
        False,
        "BatchNorm1d",
    )
    assert found.pop("resumed") == 0.0
    assert {name for name, value in found.items() if not value < 1e-6} == set()
    assert len(found) == 10


class Own(nn.Sequential):
    """Computes otherwise."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def changed(change: Any) -> Net:
    model = Net()
    change(model)
    return model


def without(model: Net) -> None:
    del model.sequential_module


def not_sequential(model: Net) -> None:
    model.sequential_module = nn.Linear(6, 3)


def overridden(model: Net) -> None:
    model.sequential_module = Own(nn.Linear(6, 6), nn.Linear(6, 3))


def twice(model: Net) -> None:
    layer = nn.Linear(6, 6)
    model.sequential_module = nn.Sequential(layer, nn.Tanh(), layer)


def tied(model: Net) -> None:
    model.sequential_module[5].weight = model.embed.weight


def unchanged(model: Net) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "options", "line"),
    [
        (without, {}, "Net has no sequential_module: put the layers to divide into an"),
        (not_sequential, {}, "Net has a Linear as sequential_module: put the layers"),
        (overridden, {}, "Net.sequential_module overrides forward, which Pipe would not call"),
        (twice, {}, "Net.sequential_module has a layer twice, which Pipe does not support"),
        (tied, {}, "embed.weight is shared by layers that may be on different devices"),
        (
            unchanged,
            {"balance": [2, 2]},
            r"balance=\[2, 2\] sums to 4, and Net.sequential_module has 6 layers",
        ),
        (unchanged, {"balance": [2, 2, 2]}, r"\[2, 2, 2\] has 3 stages, and devices=2: give each"),
        (unchanged, {"balance": [6, 0]}, r"balance=\[6, 0\]: give each device at least 1 layer"),
        (unchanged, {"balance": "tme"}, "balance='tme' is unknown; did you mean 'time'?"),
        (unchanged, {"microbatches": 0}, "microbatches=0: give at least 1"),
        (
            unchanged,
            {"checkpoint": "alway"},
            "checkpoint='alway' is unknown; did you mean 'always'",
        ),
        (
            unchanged,
            {"balance": "memory"},
            "FairScale measures the memory of GPUs; use 'parameters'",
        ),
    ],
)
def test_what_it_cannot_divide_is_refused(
    nothing_runs: None, change: Any, options: Any, line: str
) -> None:
    require(missing("fairscale"))
    with pytest.raises(ConfigurationError, match=line) as raised:
        Trainer(
            strategy="sequential_fairscale",
            strategy_options=options,
            accelerator="cpu",
            devices=2,
            max_steps=1,
        ).check_fit(changed(change))
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"sync_batchnorm": True}, "there is one replica"),
        ({"compile": True}, "a thread per device runs the stages"),
        ({"activation_checkpointing": ["Linear"]}, r"\{'checkpoint': 'always'\}"),
    ],
)
def test_what_it_does_otherwise_is_refused(apart: None, options: Any, part: str) -> None:
    require(missing("fairscale"))
    with pytest.raises(ConfigurationError, match=part):
        Trainer(strategy="sequential_fairscale", accelerator="cpu", devices=2, **options)
