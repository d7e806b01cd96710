"""What hooks and steps do to weights and gradients: as in one process, or an error in one line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.options import Options
from my_project_trainer.strategies.model_parallel.pipeline.strategy import Sequential
from tests.conformance.horovod_rows import horovodrun
from tests.project import run, succeed
from torch import Tensor, nn

from pipeline_children import Several
from processes import at_root
from user_changes_subject import Plain

NAMES = (
    *("Plain", "Clamp", "ShrinkAfterEpoch", "Teacher", "TeacherOfAll"),
    *("ClampValidated", "NoGradient", "OwnOptimizer", "ClampGroups", "ClipGroups", "MasksRow"),
    *("ResetsState", "AddsGroup", "FreezesHead", "Anchors", "HalvesByData"),
    *("ClipNorm", "ClipValue", "OptionsOnly", "HalvesHeadInStep", "ConstrainsHead"),
    "ShrinkHeadInStep",
)
# Steps that use a parameter in unusual ways.
STEPS = ("Reentrant", "ReentrantByHand", "Penalty")
# What has no gradient does not decay: engines create zeros, or step all parameters together.
UNUSED = ("PartlyUsed", "UsedAfterDetach")
# A rank would compute with its part only of what the fit has sharded.
LATER = ("CallsLater", "ReadsLater")
KEPT = ("KeepsParameters", "Prunes")
REPLICAS = ("Counts", "KeepsFeatures")  # have buffers of before the step and their own hooks
HALVES = ("HalvesHeadInStep", "HalvesByData")
MORE = ("Attends", "TrainsChainLater", "HooksGradient")
ALONE = (*NAMES, *STEPS, *UNUSED, *LATER, *KEPT, *REPLICAS, *MORE)

GROUPS = {"AddsGroup": "SGD have changed since the fit began"}
FROZEN = {"FreezesHead": "does not use head.weight"}
TWICE = {"Reentrant": "gets two gradients in one backward"}
GRADIENTS = dict.fromkeys(
    ("ClipNorm", "ClipValue", "NoGradient", "ClipGroups", "MasksRow", "HalvesByData"),
    "on_before_optimizer_step uses gradients",
)
NORM = {name: GRADIENTS[name] for name in ("ClipNorm", "MasksRow", "HalvesByData")}
WEIGHTS = {
    "Clamp": "on_after_optimizer_step uses weights",
    "ShrinkAfterEpoch": "on_train_epoch_end uses weights",
    "TeacherOfAll": "on_after_optimizer_step uses weights",
    "ClampValidated": "on_train_batch_end uses weights",
    "ClampGroups": "on_after_optimizer_step uses weights",
    "Anchors": "Anchored.step uses weights",
}
ZERO = {
    **GROUPS,
    **GRADIENTS,
    "FreezesHead": "head.weight is frozen since the fit began",
    "Anchors": "Anchored, which has a state before its first step",
}
STAGE_2 = {
    **ZERO,
    "Reentrant": "DeepSpeed cannot compute this step",
    "ReentrantByHand": "manual optimization",
}
STAGE_3 = {
    **STAGE_2,
    **dict.fromkeys(("HalvesHeadInStep", "Penalty"), "training_step uses weights"),
}
CALLS = {"CallsLater": "a Linear is called after the fit"}
LOST = dict.fromkeys(("ShrinkHeadInStep", "ConstrainsHead"), "which would be lost:")
SHARDED = {
    "HooksGradient": "sequential_module.0.weight has a hook of its gradient",
    "ReadsNorms": "item(), float() or if of a sharded tensor",
    "CreatesHead": "configure_optimizers: creates other.weight",
}
FSDP = {
    **SHARDED,
    **CALLS,
    "ReadsLater": "of a sharded",
    "ReentrantByHand": "is sharded child by child",
}
COMPUTED = {"Prunes": "sequential_module.0 computes its weight from weight_orig"}
SHARDS = (*KEPT, "OwnOptimizer", "NoGradient", "ClipGroups", "AddsGroup", "Anchors", *SHARDED)
IN_PARTS = {"strategy": "fsdp", "strategy_options": {"unit_classes": ["Sequential"]}}
LATE = ("TrainsChainLater 32-true", "TrainsChainLater bf16-mixed")
HALF = {name: {"precision": name.split()[1], **IN_PARTS} for name in LATE}


def stage(number: int, *names: str, **config: Any) -> dict[str, Any]:
    """Runs with a stage of DeepSpeed in its options."""
    options = {"strategy": "deepspeed", "strategy_options": config or {"stage": number}}
    return {f"{name} {number}": options for name in names}


WHOLE = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
# By strategy: its options, the modules that it fits, more runs with options of their own, and what
# is refused of them.
WAYS: dict[str, tuple[dict[str, Any], Sequence[str], dict[str, Any], dict[str, str]]] = {
    "ddp": ({}, (*NAMES, *STEPS, *LATER, "HooksGradient"), {}, FROZEN | TWICE),
    "ddp_zero1": ({}, NAMES, {}, FROZEN),
    # Replicas of dp are copies, in each step.
    "dp": (
        {},
        (*NAMES, *REPLICAS, "KeepsByFunction"),
        {},
        {"KeepsByFunction": "set features of the module itself", **LOST},
    ),
    "sequential": ({}, (*NAMES[:-2], *UNUSED, *LATER), {}, NORM | WEIGHTS | CALLS),
    "parameter_server": (
        {"max_staleness": 0},
        # The error of AddsGroup ends the peers.
        (*(name for name in NAMES if name != "AddsGroup"), *UNUSED),
        {},
        {},
    ),
    "fsdp": ({}, (*SHARDS, *STEPS, *LATER, *LOST, *HALVES), HALF, FSDP | LOST),
    "tensor_parallel": ({}, SHARDS, {}, SHARDED | COMPUTED),
    "horovod": ({"scale_learning_rate": False}, (*NAMES, *UNUSED), {}, GROUPS),
    "ddp_sharded": (
        {},
        (*NAMES, *STEPS),
        {name: {"strategy_options": {"find_unused_parameters": True}} for name in UNUSED},
        {
            **NORM,
            **TWICE,
            "AddsGroup": "OSS have changed since the fit began",
            **dict.fromkeys(("Anchors", "ConstrainsHead"), "ranks have different weights"),
        },
    ),
    "deepspeed_stage_1": ({}, NAMES, stage(0, *UNUSED) | stage(1, *UNUSED), ZERO),
    "deepspeed_stage_2": ({}, (*NAMES, *STEPS), stage(2, *UNUSED), STAGE_2),
    "deepspeed_stage_3": (
        {},
        (*NAMES[:-1], *STEPS, "Attends"),
        stage(3, *UNUSED) | stage(3, *LATER, config=WHOLE),
        {**LOST, **STAGE_3, **CALLS, "ReadsLater": "fit uses weights"},
    ),
}
ENGINES = {name: name.partition("_")[0] for name in WAYS if name.startswith(("deep", "horovod"))}
ENGINES["ddp_sharded"] = "fairscale"


def fits(folder: Path, runs: dict[str, Any], **how: Any) -> dict[str, Any]:
    words = ["-m", "user_changes_subject", folder, json.dumps(runs)]
    succeed(words, cwd=folder, extra=at_root(), **how)
    values: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return values


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs: dict[str, Any] = {name: {"devices": 1} for name in ALONE}
    values = fits(tmp_path_factory.mktemp("alone"), runs)
    assert len({values[name] for name in NAMES}) == len(NAMES)  # each hook matters
    return values


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            name,
            marks=[pytest.mark.needs(ENGINES[name])]
            if name in ENGINES
            else [pytest.mark.slow] * (name != "ddp"),
        )
        for name in WAYS
    ],
)
def test_a_module_trains_as_in_one_process_or_is_refused_in_one_line(tmp_path, alone, strategy):
    strategy_options, names, more, refused = WAYS[strategy]
    shared = {"strategy": strategy, "devices": 2}
    options = {**shared, "strategy_options": strategy_options} if strategy_options else shared
    runs = dict.fromkeys(names, options) | {name: shared | extra for name, extra in more.items()}
    engine = ENGINES.get(strategy, "torch")
    by = horovodrun(2) if strategy == "horovod" else ()
    results = fits(tmp_path, runs, by=by, engine=engine)
    assert results.keys() == runs.keys()
    for run_, value in results.items():
        name = run_.partition(" ")[0]
        if name in refused:
            assert refused[name] in str(value), run_
        elif run_ == LATE[1]:  # a unit that was frozen at first, in half precision
            assert value == pytest.approx(alone[name], rel=1e-2)
            assert value != results[LATE[0]]
        else:
            assert value == pytest.approx(alone[name], rel=1e-6), run_


@pytest.mark.parametrize(
    ("strategy", "name", "line"),
    [
        ("parameter_server", "AddsGroup", GROUPS["AddsGroup"]),
        pytest.param(
            "sequential",
            "ShrinkHeadInStep",
            "training_step changes head.weight, and runs for each micro",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sequential",
            "Penalty",
            "training_step uses weights that are not whole in this process",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_error_of_one_rank_ends_all(tmp_path: Path, strategy: str, name: str, line: str):
    runs = json.dumps({name: {"strategy": strategy, "devices": 2}})
    done = run(["-m", "user_changes_subject", tmp_path, runs], cwd=tmp_path, extra=at_root())
    assert done.returncode
    assert line in done.stdout + done.stderr


class Residual(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        return outputs + inputs


class WithMask(nn.Sequential):
    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        for child in self:
            inputs = child(inputs, mask)
        return inputs


class Backwards(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        for child in reversed(self):
            inputs = child(inputs)
        return inputs


class WithoutLast(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        for child in self[:-1]:
            inputs = child(inputs)
        return inputs


@pytest.mark.parametrize("kind", [Residual, WithMask, Backwards, WithoutLast, Several])
def test_a_sequential_module_is_a_chain_or_refused(kind: type[nn.Sequential]) -> None:
    with torch.random.fork_rng():  # the trainer says that a program has set its seed
        module = Plain()
    module.sequential_module = kind(*module.sequential_module)
    lines = Sequential(stages=2).problems(Options(), module)
    refused = [f"is a {kind.__name__}, whose forward does more"] * (kind is not Several)
    assert all(text in line for text, line in zip(refused, lines, strict=True))
