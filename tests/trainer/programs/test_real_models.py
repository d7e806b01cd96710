"""Models of other packages under the strategies that support them equal one process."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.conformance.rows import rounding
from tests.project import require

from real_models import MODELS
from real_models.asking import Way, asking, cells, difference, references
from real_models.base import STEPS

pytestmark = pytest.mark.slow
# Not called models, of which transformers takes a folder for its own.
PACKAGES = Path(__file__).resolve().parents[3] / "build" / "model-packages"
# Four steps through at most thirty layers, forward and back, of which each adds up in blocks: about
# ten roundings. Losses are at most 8, and fall or rise in these steps by a hundred times as much.
BOUND = rounding(STEPS * 2 * 30 * 10, 8.0)
VIT, LAYERS, RESNET, SYNC, RETINANET, UNET, GPT2, LLAMA, T5, BERT, LORA, GCN, WGAN, ACTOR = MODELS
WAYS = {
    "dp": Way((BERT,), processes=1),
    "ddp": Way((VIT,)),
    "ddp_fork": Way((), processes=1),
    "ddp_zero1": Way((T5,)),
    "fsdp": Way((GPT2,)),
    "hsdp": Way((), 4, 4, {"shard_size": 2}),
    "ddp_sharded": Way((), engine="fairscale"),
    "deepspeed_stage_1": Way((), engine="deepspeed"),
    "deepspeed_stage_2": Way((), engine="deepspeed"),
    "deepspeed_stage_3": Way((VIT,), engine="deepspeed"),
    "sequential": Way((LAYERS,), options={"microbatches": 2}),
    "tensor_parallel": Way((LLAMA,)),
}


def manual(reason: str) -> dict[str, str]:
    return dict.fromkeys((WGAN, ACTOR), reason)


DEEPSPEED = manual("its engine runs one backward and one step at a time")
TWICE = {WGAN: r"\(create_graph=True\); .* use strategy='ddp_zero1'"}
REFUSED = {
    "dp": {
        **manual("training_step runs once per replica"),
        SYNC: "a replica normalizes with its own part of the batch",
        GCN: "DataBatch cannot be",
    },
    "fsdp": TWICE,
    "hsdp": TWICE,
    "deepspeed_stage_1": DEEPSPEED,
    "deepspeed_stage_2": DEEPSPEED,
    "deepspeed_stage_3": DEEPSPEED,
    "sequential": {
        **dict.fromkeys(MODELS, "divides the children of self.sequential_module, .* has none"),
        **manual("a pipeline runs forward and backward itself"),
        SYNC: "a stage normalizes micro-batches",
    },
    "tensor_parallel": {
        **dict.fromkeys(MODELS, "has no parallelize_plan, which tensor=2 needs"),
        SYNC: "sync_batchnorm would count a sample on each rank of a tensor group",
    },
}
del REFUSED["sequential"][LAYERS], REFUSED["sequential"][RESNET], REFUSED["tensor_parallel"][LLAMA]


@pytest.fixture(scope="module")
def ask() -> Iterator[Any]:
    """Have a model trained in processes that are forked from one with all packages."""
    require(None if any(PACKAGES.glob(".ready-*")) else "models are not installed: make models")
    with asking(["images", "text", "others"], str(PACKAGES)) as asked:
        yield asked


@pytest.fixture(scope="module")
def reference(ask, tmp_path_factory: pytest.TempPathFactory):
    return references(ask, tmp_path_factory)


@pytest.mark.parametrize(("strategy", "model"), [*cells(WAYS, MODELS)])
def test_equals_one_process(ask, reference, record_property, tmp_path, strategy, model):
    way = WAYS[strategy]
    options = {"strategy": strategy, "strategy_options": way.options, "devices": way.parts}
    options |= {"sync_batchnorm": True} if model == SYNC else {}
    failure = ask(tmp_path, model, way.processes, options)
    reason = REFUSED.get(strategy, {}).get(model)
    if reason is not None:
        lines = failure.splitlines()
        assert all(line.startswith("refused: ") for line in lines), failure
        assert any(re.search(reason, line) for line in lines), failure
        record_property("models", [model, strategy, "not supported"])
        return
    assert failure == ""
    # BatchNorm normalizes each part of a batch by itself, as if it were accumulated.
    expected = reference(model, way.parts if model == RESNET else 1)
    weights = load_file(tmp_path / "weights.safetensors")
    largest = difference(weights, expected, BOUND, buffers=model != RESNET)
    record_property("models", [model, strategy, f"{largest:.1e}"])
    assert largest < BOUND
