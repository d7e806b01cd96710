"""In mixed precision, fsdp keeps no whole weights for the backward."""

import json
from functools import cache
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from tests.project import run
from torch import nn

from sharded_precision_subject import LAYERS

SMALL_UNITS = {"unit_parameters": 100}
FLOAT32 = {"parameter_dtype": "float32"}
HALF = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory):
    """Trains the subject, and gives what it counted."""

    @cache
    def results(*words: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run-")
        done = run(["-m", "sharded_precision_subject", folder, *words])
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return results


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("bf16-mixed", ()),
        pytest.param("bf16-mixed", ("own",), marks=pytest.mark.slow),
        pytest.param("16-mixed", (), marks=pytest.mark.slow),
    ],
)
def test_no_whole_weights_wait_for_the_backward(counted, precision, words):
    found = counted("fsdp", precision, json.dumps(SMALL_UNITS), *words)
    # The last unit's are there still, for its backward is the first.
    assert len(found["alive"]) == 3
    assert max(found["alive"]) <= 1
    # What autocast casts from whole weights in float32, and keeps.
    kept = counted("fsdp", precision, json.dumps(SMALL_UNITS | FLOAT32))
    assert min(kept["alive"]) >= LAYERS
    # Norms are rounded too: a layer has two roundings of 2^-9 of values around 1 (2^-12: fp16).
    rounding = torch.finfo(getattr(torch, HALF[precision])).eps / 2
    assert found["losses"] == pytest.approx(kept["losses"], rel=2 * LAYERS * rounding, abs=0)


class Norms(nn.Module):
    """Makes a float32 tensor between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(x + torch.ones(8))


class Holder(trainer.TrainingModule):
    """A model of layers in half precision; ``mixes``: and an operation of both data types."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.mixes, self.seen = Norms(), mixes, set[torch.dtype]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        y = batch @ self.model.first.weight.T if self.mixes else self.model(batch)
        self.seen.add(y.dtype)
        return y.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


def fit(module: trainer.TrainingModule) -> None:
    base = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_progress_bar": False}
    run_of = trainer.Trainer(**base, strategy="fsdp", precision="bf16-mixed", loggers=[])
    run_of.fit(module, [torch.ones(4, 6)] * 2)


def test_layers_compute_in_half_precision_and_the_loss_in_float32(apart):
    module, seen = Holder(mixes=False), []
    for each in (module.model.first, module.model.norm, module.model.last):
        each.register_forward_hook(
            lambda layer, args, y: seen.append((args[0].dtype, layer.weight.dtype, y.dtype))
        )
    fit(module)
    half = (torch.bfloat16,) * 3
    norm = (torch.bfloat16, torch.float32, torch.bfloat16)
    assert seen == [half, norm, half] * 2
    assert module.seen == {torch.float32}
    assert {each.dtype for each in module.parameters()} == {torch.float32}


def test_an_operation_of_two_data_types_is_explained(apart):
    line = r"mixes float32 and half precision \(test_sharded_precision.py, line \d+\).*cast the"
    with pytest.raises(trainer.UserError, match=line):
        fit(Holder(mixes=True))
