"""Models that many users write, under each strategy, equal one process or end in one line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.conformance.horovod_rows import horovodrun
from tests.project import succeed
from torch import Tensor

from processes import at_root
from real_models.asking import Way, asking, cells, difference, references

pytestmark = pytest.mark.slow
# 300 roundings of losses that are below 8; they change by a thousand times as much.
BOUND = 2e-5
CHAINS = ("ClassWeights", "Autoencoder", "Teacher", "Clamped", "OwnClipping", "Transfer")
MANUAL = ("Adversarial", "Regression")
MODELS = (
    *CHAINS,
    *MANUAL,
    *("Convolutions", "Skips", "Recurrent", "Attention", "TinyGPT", "Variational"),
    *("Siamese", "Recommender", "Heads", "Graphs"),
)
PARTS = "Convolutions"  # replicas normalize their own parts of a batch
SMALL_UNITS = {"unit_parameters": 20}
WAYS = {
    "dp": Way(("Teacher", "Graphs"), processes=1),
    "ddp2": Way(("Clamped",), processes=1),
    "ddp": Way(("TinyGPT",)),
    "ddp_zero1": Way(("OwnClipping", "Recommender")),
    "fsdp": Way(("Transfer", "Regression"), options=SMALL_UNITS),
    "hsdp": Way(("Variational",), 4, 4, {"shard_size": 2, **SMALL_UNITS}),
    "parameter_server": Way(("Siamese",), options={"max_staleness": 0}),
    "ddp_sharded": Way(("Recurrent", "Adversarial"), engine="fairscale"),
    "deepspeed_stage_1": Way(("Skips",), engine="deepspeed"),
    "deepspeed_stage_2": Way(("Recurrent",), engine="deepspeed"),
    "deepspeed_stage_3": Way(("Attention",), engine="deepspeed"),
    "sequential": Way(("Convolutions", "Heads"), options={"microbatches": 2}),
    "tensor_parallel": Way(("ClassWeights",)),
    "mesh": Way(("Autoencoder",), options={"shard": 1, "tensor": 2, **SMALL_UNITS}),
}


HOROVOD = {"strategy": "horovod", "strategy_options": {"scale_learning_rate": False}}
ZERO = ("ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


def refused(strategy: str, model: str) -> str:
    """How the only line of each problem begins; empty: the strategy trains the model."""
    is_meshed = strategy in ("tensor_parallel", "mesh")
    without = f"strategy='{strategy}' does not support "
    if model == "Skips" and strategy not in ("ddp", "ddp_zero1", "fsdp", "hsdp", "horovod", *ZERO):
        return "sync_batchnorm would count" if is_meshed else f"{without}sync_batchnorm"
    if model in MANUAL and strategy in ("dp", "ddp2", "parameter_server", "horovod", *ZERO[1:]):
        return f"{without}manual optimization"
    if model == "Graphs" and strategy in ("dp", "ddp2"):
        return "a batch of 27 samples is split, and has tensors of shapes"
    if model == "OwnClipping" and strategy in ("sequential", *ZERO):
        return "on_before_optimizer_step uses gradients that are not whole"
    if model in ("Clamped", "Teacher") and strategy == "sequential":
        return "on_train_batch_end uses weights that are not whole"
    if model == "Teacher" and is_meshed:
        return "on_train_batch_end cannot do this with sharded tensors (DTensors)"
    if strategy == "sequential" and model not in (*CHAINS, PARTS):
        return "a pipeline divides the children" if model not in MANUAL else without
    return f"{model} has no parallelize_plan" if is_meshed and model not in CHAINS else ""


@pytest.fixture(scope="module")
def ask() -> Iterator[Any]:
    with asking(["everyday"]) as asked:
        yield asked


@pytest.fixture(scope="module")
def reference(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return references(ask, tmp_path_factory)


def check(folder: Path, answer: str, begin: str, expected: dict[str, Tensor], model: str) -> str:
    """Check a run, or its error; what the table says of it."""
    if begin:
        lines = answer.splitlines()
        assert all(line.startswith("refused: ") for line in lines), answer
        assert lines[0].removeprefix("refused: ").startswith(begin)
        log = folder / "run" / "metrics.csv"  # its first step had not ended
        assert not log.exists() or len(log.read_text().splitlines()) == 1
        return "not supported"
    assert answer == ""
    weights = load_file(folder / "weights.safetensors")
    largest = difference(weights, expected, BOUND, buffers=model != PARTS)
    assert largest < BOUND
    return f"{largest:.1e}"


@pytest.mark.parametrize(("strategy", "model"), [*cells(WAYS, MODELS)])
def test_equals_one_process(ask, reference, record_property, tmp_path, strategy, model):
    way = WAYS[strategy]
    options = {"strategy": strategy, "strategy_options": way.options, "devices": way.parts}
    answer = ask(tmp_path, model, way.processes, options)
    begin, expected = refused(strategy, model), reference(model, way.parts if model == PARTS else 1)
    error = check(tmp_path, answer, begin, expected, model)
    record_property("models", [model, strategy, error])


@pytest.mark.needs("horovod")
def test_equals_one_process_under_horovod(reference, record_property, tmp_path):
    options = json.dumps({"devices": 2, **HOROVOD})
    words = ["-m", "real_models.worker", tmp_path, options, *MODELS]
    succeed(words, cwd=tmp_path, by=horovodrun(2), extra=at_root())
    for model, answer in json.loads((tmp_path / "answers.json").read_text()).items():
        begin, expected = refused("horovod", model), reference(model, 1 + (model == PARTS))
        error = check(tmp_path / model, answer, begin, expected, model)
        record_property("models", [model, "horovod", error])
