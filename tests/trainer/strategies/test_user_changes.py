"""What hooks do to weights and gradients: as in one process, or an error in one line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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
    *("ResetsState", "AddsGroup", "FreezesHead", "Anchors"),
    *("ClipNorm", "ClipValue", "OptionsOnly", "HalvesHeadInStep", "ShrinkHeadInStep"),
)
GROUPS = {"AddsGroup": "SGD have changed since the fit began"}
UNUSED = {"FreezesHead": "does not use head.weight"}
GRADIENTS = dict.fromkeys(
    ("ClipNorm", "ClipValue", "NoGradient", "ClipGroups", "MasksRow"),
    "on_before_optimizer_step uses gradients",
)
NORM = {each: GRADIENTS[each] for each in ("ClipNorm", "MasksRow")}
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
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def fits(folder: Path, names: Sequence[str], by: Sequence[str], **options: Any) -> dict[str, Any]:
    launcher = list(by) if by and not by[0].startswith("-") else []
    words = [*(() if launcher else by), "-m", "user_changes_subject"]
    arguments = [*words, folder, json.dumps(options), *names]
    succeed(arguments, cwd=folder, by=launcher, extra=at_root())
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = fits(tmp_path_factory.mktemp("alone"), NAMES, (), devices=1)
    assert len(set(found.values())) == len(NAMES)  # each hook matters
    return found


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        pytest.param({"strategy": "ddp"}, UNUSED, id="ddp"),
        pytest.param({"strategy": "ddp_zero1"}, UNUSED, id="zero1"),
        pytest.param({"strategy": "dp", "devices": 2}, {}, id="dp"),
        pytest.param(
            {"strategy": "horovod", "strategy_options": {"scale_learning_rate": False}},
            GROUPS,
            id="horovod",
            marks=pytest.mark.needs("horovod"),
        ),
        pytest.param(
            {"strategy": "parameter_server", "strategy_options": {"max_staleness": 0}},
            {},
            id="parameter_server",
        ),
        pytest.param(
            {"strategy": "ddp_sharded"},
            {**NORM, "AddsGroup": "OSS have changed since the fit began"},
            id="sharded",
            marks=pytest.mark.needs("fairscale"),
        ),
        pytest.param({"strategy": "sequential"}, {**NORM, **WEIGHTS}, id="sequential"),
        *(
            pytest.param(options, refused, id=name, marks=pytest.mark.needs("deepspeed"))
            for name, options, refused in (
                ("stage 1", {"strategy": "deepspeed_stage_1"}, ZERO),
                ("stage 2", {"strategy": "deepspeed_stage_2"}, ZERO),
                ("stage 3", {"strategy": "deepspeed_stage_3"}, ZERO),
            )
        ),
    ],
)
def test_hooks_change_what_they_change_in_one_process(
    tmp_path: Path, alone: dict[str, Any], options: dict[str, Any], refused: dict[str, str]
):
    name = options["strategy"]
    launchers: dict[str, Sequence[str]] = {"dp": (), "horovod": horovodrun(2)}
    # Stage 3 has other weights in a step; the others run the step on each part of a batch.
    in_step = name not in ("dp", "sequential", "deepspeed_stage_3")
    names = list(NAMES if in_step else NAMES[:-1])
    if name == "parameter_server":
        names.remove("AddsGroup")  # whose error ends the peers
    by = launchers.get(name, TORCHRUN)
    found = fits(tmp_path, names, by, **{"devices": 2, **options})
    for each in names:
        if each in refused:
            assert refused[each] in found[each]
        else:
            assert found[each] == pytest.approx(alone[each], rel=1e-6), each


@pytest.mark.parametrize(
    ("strategy", "name", "line"),
    [
        ("parameter_server", "AddsGroup", GROUPS["AddsGroup"]),
        ("sequential", "Penalty", "training_step uses weights that are not whole in this process"),
    ],
)
def test_the_error_of_one_rank_ends_all(tmp_path: Path, strategy: str, name: str, line: str):
    words = [*TORCHRUN, "-m", "user_changes_subject", tmp_path]
    options = json.dumps({"strategy": strategy, "devices": 2})
    done = run([*words, options, name], cwd=tmp_path, extra=at_root())
    assert done.returncode
    assert line in done.stdout + done.stderr


SHARDED = {
    "HooksGradient": "sequential_module.0.weight has a hook of its gradient",
    "ReadsNorms": "item(), float() or if of a sharded tensor",
    "CreatesHead": "configure_optimizers: creates other.weight",
}


COMPUTED = {"Prunes": "sequential_module.0 computes its weight from weight_orig"}


@pytest.mark.parametrize(("strategy", "refused"), [("fsdp", {}), ("tensor_parallel", COMPUTED)])
def test_shards_are_what_the_module_keeps(tmp_path: Path, strategy: str, refused: dict[str, str]):
    names = [
        *("KeepsParameters", "OwnOptimizer", "NoGradient", "ClipGroups", "AddsGroup", "Anchors"),
        "Prunes",
    ]
    refused = {**SHARDED, **refused}
    alone = fits(tmp_path, names, (), devices=1, run_name="alone")
    found = fits(tmp_path, [*names, *SHARDED], TORCHRUN, devices=2, strategy=strategy)
    for each in found:
        if each in refused:
            assert refused[each] in found[each]
        else:
            assert found[each] == pytest.approx(alone[each], rel=1e-6), each


@pytest.mark.needs("deepspeed")
def test_stage_3_evaluates_attention_with_a_mask(tmp_path: Path):
    alone = fits(tmp_path, ["Attends"], (), devices=1, run_name="alone")
    found = fits(tmp_path, ["Attends"], TORCHRUN, devices=2, strategy="deepspeed_stage_3")
    assert found == pytest.approx(alone, rel=1e-6)


def test_replicas_of_dp_have_buffers_of_before_the_step_and_their_own_hooks(tmp_path: Path):
    names = ["Counts", "KeepsFeatures", "KeepsByFunction"]
    alone = fits(tmp_path, names, (), devices=1, run_name="1")
    found = fits(tmp_path, names, (), strategy="dp", devices=2)
    assert "set features of the module itself" in found.pop(names[2])
    assert found == pytest.approx({name: alone[name] for name in names[:2]}, rel=1e-6)


def test_fsdp_trains_in_half_precision_a_unit_that_was_frozen_at_first(tmp_path: Path):
    units = {"strategy": "fsdp", "strategy_options": {"unit_classes": ["Sequential"]}}
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        options = {"devices": 2, "precision": precision, "run_name": precision, **units}
        found |= {precision: fits(tmp_path, ["TrainsChainLater"], TORCHRUN, **options)}
    exact, half = (found[each]["TrainsChainLater"] for each in ("32-true", "bf16-mixed"))
    assert half == pytest.approx(exact, rel=1e-2)
    assert half != exact


ENGINE = "DeepSpeed cannot compute this step"
TWICE = {"Reentrant": "gets two gradients in one backward"}
STAGE_2 = {"Reentrant": ENGINE, "ReentrantByHand": "manual optimization"}
STAGE_3 = {**STAGE_2, **dict.fromkeys(("Functional", "Penalty"), "training_step uses weights")}


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        ("ddp", TWICE),
        ("fsdp", {"ReentrantByHand": "is sharded child by child"}),
        pytest.param("ddp_sharded", TWICE, marks=pytest.mark.needs("fairscale")),
        pytest.param("deepspeed_stage_2", STAGE_2, marks=pytest.mark.needs("deepspeed")),
        pytest.param("deepspeed_stage_3", STAGE_3, marks=pytest.mark.needs("deepspeed")),
    ],
)
def test_steps_that_use_a_parameter_in_unusual_ways(
    tmp_path: Path, strategy: str, refused: dict[str, str]
):
    names = ["Reentrant", "ReentrantByHand", "Functional", "Penalty"]
    alone = fits(tmp_path, names, (), devices=1, run_name="alone")
    found = fits(tmp_path, names, TORCHRUN, devices=2, strategy=strategy)
    for name in names:
        if name in refused:
            assert refused[name] in found[name]
        else:
            assert found[name] == pytest.approx(alone[name], rel=1e-6), name


def test_what_no_output_uses_has_no_gradient_in_a_pipeline(tmp_path: Path):
    names, options = ["PartlyUsed", "UsedAfterDetach"], {"strategy": "sequential", "devices": 2}
    alone = fits(tmp_path, names, (), devices=1, run_name="alone")
    assert fits(tmp_path, names, TORCHRUN, **options) == pytest.approx(alone, rel=1e-6)


DECAYING = [
    *(("deepspeed", "deepspeed", {"stage": stage}) for stage in range(4)),
    ("fairscale", "ddp_sharded", {"find_unused_parameters": True}),
    ("horovod", "horovod", {"scale_learning_rate": False}),
    ("", "parameter_server", {"max_staleness": 0}),
]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(*given, marks=[pytest.mark.needs(engine)] if engine else [])
        for engine, *given in DECAYING
    ],
)
def test_what_has_no_gradient_does_not_decay(tmp_path: Path, strategy: str, options: Any):
    """Engines create zeros, or step all parameters together."""
    names = ["PartlyUsed", "UsedAfterDetach"]
    alone = fits(tmp_path, names, (), devices=1, run_name="alone")
    by = horovodrun(2) if strategy == "horovod" else TORCHRUN
    found = fits(tmp_path, names, by, devices=2, strategy=strategy, strategy_options=options)
    assert found == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        ("fsdp", {"CallsLater": "a Linear is called after the fit", "ReadsLater": "of a sharded"}),
        ("sequential", {"CallsLater": "a Linear is called after the fit"}),
        ("ddp", {}),
        pytest.param(
            "deepspeed",
            {"CallsLater": "a Linear is called after the fit", "ReadsLater": "fit uses weights"},
            marks=pytest.mark.needs("deepspeed"),
        ),
    ],
)
def test_what_a_fit_has_sharded_is_not_computed_with(
    tmp_path: Path, strategy: str, refused: dict[str, str]
):
    """A rank would do it with its part only."""
    stage_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    options = {"config": stage_3} if strategy == "deepspeed" else {}
    names = ["CallsLater", "ReadsLater"]
    found = fits(tmp_path, names, TORCHRUN, devices=2, strategy=strategy, strategy_options=options)
    assert all(refused.get(name, "") in str(found[name]) for name in names)
    assert [name for name in names if isinstance(found[name], str)] == list(refused)


class Residual(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = super().forward(given)
        return found + given


class WithMask(nn.Sequential):
    def forward(self, given: Tensor, mask: Tensor | None = None) -> Tensor:
        for child in self:
            given = child(given, mask)
        return given


class Backwards(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        for child in reversed(self):
            given = child(given)
        return given


class WithoutLast(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        for child in self[:-1]:
            given = child(given)
        return given


@pytest.mark.parametrize("kind", [Residual, WithMask, Backwards, WithoutLast])
def test_a_sequential_module_whose_forward_is_no_chain_is_refused(kind: type[nn.Sequential]):
    module = Plain()
    module.sequential_module = kind(*module.sequential_module)
    (line,) = Sequential(stages=2).problems(Options(), module)
    assert f"is a {kind.__name__}, whose forward does more" in line


def test_a_sequential_module_that_unpacks_tuples_is_a_chain():
    module = Plain()
    module.sequential_module = Several(*module.sequential_module)
    assert Sequential(stages=2).problems(Options(), module) == []
