"""Under autocast, strategies that shard parameters keep no whole weights for the backward."""

import json
from functools import cache
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.strategies import recast
from tests.project import run
from torch import nn
from torch.nn.functional import conv2d, linear, multi_head_attention_forward

from sharded_precision_subject import LAYERS

SMALL_UNITS = {"unit_parameters": 100}
FLOAT32 = {"parameter_dtype": "float32"}
HALF = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
FSDP = ("fsdp", SMALL_UNITS)
FAIRSCALE = pytest.param(
    *("fairscale_fsdp", {"min_num_params": 100}),
    marks=[pytest.mark.slow, pytest.mark.needs("fairscale")],
)
DEEPSPEED = pytest.param(
    *("deepspeed_stage_3", {"allgather_bucket_size": 2}),
    marks=[pytest.mark.slow, pytest.mark.needs("deepspeed")],
)


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


@pytest.mark.parametrize(("strategy", "options"), [FSDP, FAIRSCALE, DEEPSPEED])
@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("bf16-mixed", ()),
        pytest.param("bf16-mixed", ("own",), marks=pytest.mark.slow),
        pytest.param("16-mixed", (), marks=pytest.mark.slow),
    ],
)
def test_no_whole_weights_wait_for_the_backward(counted, strategy, options, precision, words):
    found = counted(strategy, precision, json.dumps(options), *words)
    # The last unit's are there still, for its backward is the first.
    assert len(found["alive"]) == 3
    assert max(found["alive"]) <= 1
    # What autocast casts from whole weights in float32, and keeps.
    kept = counted("fsdp", precision, json.dumps(SMALL_UNITS | FLOAT32))
    assert min(kept["alive"]) >= LAYERS
    # fsdp rounds norms too: a layer has two roundings of 2^-9 of values around 1 (2^-12: fp16).
    rounding = torch.finfo(getattr(torch, HALF[precision])).eps / 2
    exact = 2 * LAYERS * rounding if strategy == "fsdp" else 0
    assert found["losses"] == pytest.approx(kept["losses"], rel=exact, abs=0)


def halves(operation: Any, *inputs: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Gradients of an operation under autocast, and the same with weights that are cast again."""
    found = []
    for recasting in (False, True):
        own = [nn.Parameter(each.clone()) for each in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            if recasting:
                with recast.Recast(torch.bfloat16):
                    result = operation(*own)
            else:
                result = operation(*own)
        result.float().square().sum().backward()
        found.append([result, *(each.grad for each in own)])
    return found[0], found[1]


WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "operation",
    [
        lambda w: linear(X, w),
        lambda w: X @ w,
        lambda w: X @ w.T,
        lambda w: torch.einsum("bti,oi->bto", X, w[2:]),
        lambda w: torch.baddbmm(w[0], X, w.expand(3, 6, 6)),
        lambda w: conv2d(X[None, :, :1].transpose(1, 3), w[:, :, None, None]),
        lambda w: multi_head_attention_forward(
            X, X, X, 6, 2, w.repeat(3, 1), None, w[:1, None], w[1:2, None], False, 0.0, w, None
        )[0],
    ],
)
def test_weights_that_are_cast_again_give_the_same_gradients(operation):
    plain, again = halves(operation, WEIGHT)
    assert all(torch.equal(*each) for each in zip(plain, again, strict=True))


def test_a_change_in_place_is_noticed_still():
    weight, x = nn.Parameter(WEIGHT.clone()), X.bfloat16().clone()
    with torch.autocast("cpu", torch.bfloat16), recast.Recast(torch.bfloat16):
        result = linear(x, weight).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place since the forward"):
        result.backward()


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
