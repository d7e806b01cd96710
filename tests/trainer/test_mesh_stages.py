"""Pipelines whose stages are sharded and replicated in a mesh equal one process, and go on."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies.model_parallel.mesh.strategy import Mesh
from safetensors.torch import load_file
from tests.project import run
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput

from mesh_subject import GPT, SAMPLES
from pipeline_subject import Subject, dashed
from stages_subject import CASES, GPTS

SECONDS = 600.0
pytestmark = pytest.mark.timeout(4 * SECONDS)
WHICH = pytest.mark.parametrize(
    "which",
    [
        pytest.param("four", marks=pytest.mark.slow),
        pytest.param("eight", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Trains the pipelines of a number of processes, then in one process; gives the folder."""

    @cache
    def folder(which: str) -> Path:
        path = tmp_path_factory.mktemp("stages-")
        for words in ([which], ["alone", which]):
            done = run(["-m", "stages_subject", path, *words], timeout=SECONDS)
            assert done.returncode == 0, done.stderr
        return path

    return folder


def distance(folder: Path, one: str, other: str) -> float:
    """Largest difference of a weight, an optimizer state, or what was logged."""
    ours, theirs = (load_file(folder / f"{dashed(each)}.safetensors") for each in (one, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours)


@WHICH
def test_a_gpt_equals_one_process_and_goes_on_elsewhere(trained, which):
    folder = trained(which)
    expected = json.loads((folder / "one.json").read_text())
    predicted = expected.pop("predicted")
    before = None
    for name in GPTS[which]:
        assert distance(folder, "one", name) < 1e-6, name
        assert distance(folder, name, f"{name}-resumed") == 0, name
        assert distance(folder, "one", f"{name}-to-one") < 1e-6, name
        assert before is None or distance(folder, "one", f"{before}-to-{name}") < 1e-6
        found = json.loads((folder / f"{name}.json").read_text())
        assert found.pop("predicted") == predicted
        assert found["count"] == len(predicted) == SAMPLES
        assert found == pytest.approx(expected, abs=1e-5)
        before = name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_equals_one_process(trained, name):
    assert distance(trained("four"), name, f"{name} alone") <= CASES[name].tolerance


@pytest.mark.slow
def test_half_precision_gathers_a_stage_in_it_and_adds_up_gradients_in_float32(trained):
    for rank in range(4):
        copies, weights, _, messages = json.loads(
            (trained("four") / f"half-{rank}.json").read_text()
        )
        assert copies == 0  # by autocast
        assert weights == [["torch.bfloat16", "None"], ["torch.bfloat16", "torch.float32"]]
        collectives = {name: dtype for (name, peer, dtype), _ in messages if peer < 0}
        assert collectives == {
            "_allgather_base_": "torch.bfloat16",
            "_reduce_scatter_base_": "torch.float32",
        }


@pytest.mark.slow
def test_a_tensor_group_draws_the_same_but_where_activations_are_sharded(trained):
    ranks = [load_file(trained("four") / f"drawn-{rank}.safetensors") for rank in range(4)]
    last, first = ranks[:2], ranks[2:]
    for one, other in (last, first):
        same = {name for name in one if torch.equal(one[name], other[name])}
        assert same == {"outside", "end", "before"}
    # The step before its stages, on the first and the last process.
    assert torch.equal(last[0]["before"], first[0]["before"])
    assert not torch.equal(last[0]["outside"], first[0]["outside"])


def refused(module: Any, devices: int = 4, **options: Any) -> list[str]:
    """The lines that refuse options, before any process starts."""
    with pytest.raises(ConfigurationError) as caught:
        trainer.Trainer(
            accelerator="cpu",
            max_steps=1,
            strategy="mesh",
            devices=devices,
            strategy_options=options,
        ).check_fit(module)
    return caught.value.problems


def test_options_that_do_not_fit_are_refused_in_one_line_each():
    assert refused(GPT(), microbatches=2, schedule="gpipe") == [
        f"strategy_options.{name} has no effect with pipeline=1, which has no stages; remove it, "
        "or set strategy_options.pipeline of strategy='mesh'"
        for name in ("microbatches", "schedule")
    ]
    lines = refused(
        GPT(), pipeline=2, context=2, shard=0, microbatches=0, schedule="pipe", offload=True
    )
    assert [re.split("[:;]", line)[0] for line in lines] == [
        "strategy_options.shard=0",
        "strategy_options",
        "strategy_options.offload has no effect with pipeline=2",
        "strategy_options.schedule='pipe' is unknown",
        "strategy_options.microbatches=0",
    ]
    assert "context=2 with pipeline=2 is not supported" in lines[1]
    (line,) = refused(GPT(), pipeline=3)
    assert line == "strategy_options: pipeline=3 x data=-1: 4 processes are not divisible by 3"
    (line,) = refused(GPT(), data=1, pipeline=2)
    assert "pipeline=2 x data=1 is a mesh of 2 processes, and there are 4" in line
    (line,) = refused(GPT(layers=2), pipeline=-1, data=1)
    assert line == "GPT.sequential_module has 2 children for 4 stages; use fewer stages"
    with pytest.raises(ConfigurationError, match="and strategy_options instead"):
        Mesh(pipeline=2)


def test_styles_of_what_is_divided_are_refused():
    class Planned(Subject):
        def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
            inputs = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0))
            return {"sequential_module": inputs, "sequential_module.0": ColwiseParallel()}

    assert refused(Planned(), pipeline=2, tensor=2) == [
        "parallelize_plan['sequential_module'] is a PrepareModuleInput of what a pipeline divides; "
        "give styles to the children of sequential_module"
    ]
