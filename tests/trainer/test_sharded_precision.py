"""Under autocast, strategies that shard parameters keep no whole weights for the backward."""

import json
from functools import cache
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.strategies import recast
from my_project_trainer.strategies.fsdp import precision as fsdp_precision
from my_project_trainer.strategies.precision import Precision
from tests.project import run
from torch import nn
from torch.nn.functional import conv2d, linear, multi_head_attention_forward

from sharded_precision_subject import LAYERS

SMALL_UNITS = {"unit_parameters": 100}
FLOAT32 = {"parameter_dtype": "float32"}
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
    assert found["losses"] == kept["losses"]


def test_what_autocast_casts():
    cast = [
        (nn.Linear(2, 2), "weight"),
        (nn.Conv2d(2, 2, 1), "bias"),
        (nn.MultiheadAttention(2, 1), "in_proj_weight"),
    ]
    left = [
        (nn.LayerNorm(2), "weight"),
        (nn.Embedding(2, 2), "weight"),
        (nn.BatchNorm1d(2), "weight"),
        (nn.MultiheadAttention(2, 1, add_bias_kv=True), "bias_k"),
    ]
    assert [fsdp_precision.is_cast(*each) for each in cast + left] == [True] * 3 + [False] * 4


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


def test_a_layer_without_autocast_says_what_to_do():
    layer = nn.Sequential(nn.Linear(2, 2))
    calls = fsdp_precision.AutocastCalls(Precision("bf16-mixed", "cpu"))
    calls.watch(layer, [layer])
    # From a hook, outside a step, a unit computes as within one.
    assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    line = r"^0 is called without autocast.*dtype float32$"
    with pytest.raises(trainer.UserError, match=line), calls.step():
        layer(torch.ones(1, 2))
    calls.close()
    assert layer(torch.ones(1, 2)).dtype == torch.float32
