"""DeepSpeed's configuration: what is taken, completed and refused before anything starts."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer import strategies
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies.deepspeed import optimizers, settings
from my_project_trainer.strategies.deepspeed.state import step_of
from my_project_trainer.strategies.optimizers import Optimization, read_optimization
from tests.conformance.subject import make as make_subject


def problems(strategy: str = "deepspeed", **options: Any) -> list[str]:
    """What a trainer says to options of a strategy; its own ones are under ``trainer``."""
    base = {"accelerator": "cpu", "devices": 2, "strategy": strategy, **options.pop("trainer", {})}
    try:
        trainer.Trainer(**base, strategy_options=options)
    except ConfigurationError as error:
        return [problem for problem in error.problems if "needs the package" not in problem]
    return []


def written(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.needs("deepspeed")
def test_checking_a_configuration_changes_no_variable(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    problems(config={"zero_optimization": {"stage": 1}})  # what its import itself sets stays
    os.environ.pop("DS_ACCELERATOR", None)
    before = dict(os.environ)
    assert problems(config={"zero_optimization": {"stage": "x"}}, trainer={"max_steps": 1})
    assert dict(os.environ) == before


def test_a_configuration_is_a_dict_a_file_or_named_by_a_variable(tmp_path, monkeypatch):
    config = {"zero_optimization": {"stage": 1}}
    older = written(tmp_path / "older.json", {"zero_optimization": {"stage": 3}})
    assert settings.read(None) is None
    assert settings.read(config) == settings.read(written(tmp_path / "own.json", config)) == config
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", older)
    assert settings.read(None) == {"zero_optimization": {"stage": 3}}
    monkeypatch.setenv("TRAINER_DEEPSPEED_CONFIG", str(tmp_path / "own.json"))
    assert settings.read(None) == config
    assert settings.read({"bf16": {}}) == {"bf16": {}}


def test_an_own_configuration_replaces_every_option():
    ours: Any = strategies.create("deepspeed", {"stage": 3, "reduce_bucket_size": 4_000})
    replaced = {"stage": 3, "config": {"wall_clock_breakdown": False}}
    theirs: Any = strategies.create("deepspeed", replaced)
    assert ours.config["zero_optimization"]["stage"] == 3
    assert ours.config["zero_optimization"]["reduce_bucket_size"] == 4_000
    assert ours.limits.shards_parameters
    assert theirs.config == {"wall_clock_breakdown": False}
    assert not theirs.limits.shards_parameters


def sizes(device_type: str, elements: int, **options: Any) -> tuple[Any, ...]:
    """Of the buffers that DeepSpeed is given, and whether it averages beside backward."""
    ours: Any = strategies.create("deepspeed", options)
    sized = settings.sized(settings.completed(ours.config), device_type, elements)
    zero = sized["zero_optimization"]
    ahead = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    buckets = (zero["reduce_bucket_size"], zero["allgather_bucket_size"])
    return (*buckets, *(zero.get(f"stage3_{name}") for name in ahead), zero["overlap_comm"])


def test_buffers_are_as_small_as_ddp_s_on_cpus_and_deepspeed_s_own_on_gpus():
    million = 10**6
    large = 10_000 * million
    small = (4 * million, 5 * million, 5 * million, 10 * million, 10 * million, False)
    assert sizes("cpu", large) == sizes("cpu", large, stage=3) == small
    defaults = (500 * million, 500 * million, None, None, None, True)
    assert sizes("cuda", large) == sizes("cuda", large, stage=3) == defaults
    # Several buckets of a smaller model, and none that is larger than it.
    assert sizes("cuda", 124 * million)[:2] == (31 * million, 124 * million)
    assert sizes("cuda", 9)[:2] == sizes("cpu", 9)[:2] == (10, 10)
    assert sizes("cuda", 4 * million * 4 + 4)[0] == 4 * million + 2  # even
    configured = {"reduce_bucket_size": 7, "allgather_bucket_size": 6}
    for device_type in ("cpu", "cuda"):
        assert sizes(device_type, large, **configured)[:-1] == (8, 6, 6, 12, 12)


@pytest.mark.parametrize(
    ("home", "step", "expected"),
    [("deepspeed", torch.tensor(5.0), 5), ("torch", 5, torch.tensor(5.0)), ("own", 5, 5)],
)
def test_a_step_count_is_loaded_as_the_optimizer_stores_it(home, step, expected):
    flat = torch.ones(2)
    made = type("Made", (torch.optim.SGD,), {"__module__": f"{home}.adam"})([flat])
    count = step_of(made, {}, step, flat)
    assert type(count) is type(expected)
    assert count == expected


def test_its_timer_that_waits_for_the_device_is_off_unless_asked_for():
    assert settings.completed({})["timers"] == {"throughput": {"enabled": False}}
    config = {"timers": {"throughput": {"enabled": True}}}
    assert settings.completed(config)["timers"] == config["timers"]


def test_clipping_is_off_unless_the_trainer_clips():
    # DeepSpeed's own default is 1.0.
    assert settings.completed({})["gradient_clipping"] == 0.0


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken.json").write_text("{")
    missing, broken = str(tmp_path / "missing.json"), str(tmp_path / "broken.json")
    listed = written(tmp_path / "list.json", [1])
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')
    (tmp_path / "deep.json").write_text("[" * 10_000)
    os.mkfifo(tmp_path / "pipe.json")
    bad, deep, pipe = (str(tmp_path / f"{name}.json") for name in ("bytes", "deep", "pipe"))
    gone = f"={missing!r}: No such file or directory; give DeepSpeed's JSON file"
    for config, line in (
        (missing, gone),
        (broken, f"={broken!r} is not JSON: "),
        (bad, f"={bad!r} is not JSON: 'utf-8' codec"),
        (deep, f"={deep!r} is not JSON: nested more than 50 levels deep"),
        (pipe, f"={pipe!r} is not JSON: is not a regular file"),
        ("/dev/zero", "='/dev/zero' is not JSON: is not a regular file"),
        (str(tmp_path), f"={str(tmp_path)!r}: Is a directory; give"),
        (listed, f"={listed!r} holds a list; give a JSON object"),
        (3, "=3: expected Mapping[str, Any] | str | PathLike[str] | None"),
    ):
        (problem,) = problems(config=config)
        assert problem.startswith(f"strategy_options.config{line}")
    monkeypatch.setenv("TRAINER_DEEPSPEED_CONFIG", missing)
    assert problems() == [f"TRAINER_DEEPSPEED_CONFIG{gone}"]


ON, ONE_BIT = {"enabled": True}, {"optimizer": {"type": "OneBitAdam"}}


@pytest.mark.parametrize(
    ("config", "options", "phrases"),
    [
        ({"gradient_clipping": 1.0}, {}, ["gradient_clipping=1.0", "gradient_clip_val=None"]),
        ({"gradient_accumulation_steps": 4}, {}, ["accumulate_grad_batches=1"]),
        ({"train_batch_size": 64}, {"global_batch_size": 32}, ["global_batch_size=32"]),
        ({"train_micro_batch_size_per_gpu": 8}, {}, ["what the loader gives"]),
        ({"fp16": ON}, {}, ["fp16.enabled=True in", "precision='32-true'", "give precision='16-"]),
        ({"bf16": ON}, {"precision": "16-mixed"}, ["bf16.enabled=True in", "give precision='bf16"]),
        ({"bfloat16": ON}, {}, ["bfloat16.enabled=True", "'bf16-mixed'"]),
        ({"bf16": {"enabled": False}}, {"precision": "bf16-mixed"}, ["give precision='32-true'"]),
        (
            {"fp16": {"loss_scale": 128, "hysteresis": 2}},
            {"precision": 16},
            ["fp16.loss_scale=128, fp16.hysteresis=2 in", "leave it"],
        ),
        (
            {"bf16": {**ON, "check_grad_overflow": False}},
            {"precision": "bf16"},
            ["bf16.check_grad_overflow=False in"],
        ),
        ({"torch_autocast": {"enabled": True}}, {}, ["torch_autocast in", "precision"]),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, ["splits batches over all processes"]),
        ({"optimizer": {"params": {}}}, {}, ["optimizer in", "'type'"]),
        ({"optimizer": {"type": "LBFGS"}}, {}, ["optimizer 'LBFGS'", "is not one of those"]),
        ({"scheduler": {"type": "WarmupRL"}}, {}, ["'WarmupRL'", "did you mean 'WarmupLR'"]),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            {},
            ["offload_param to 'nvme'", "use 'cpu'"],
        ),
        (
            {**ONE_BIT, "zero_optimization": {"stage": 2}},
            {},
            ["OneBitAdam", "ZeRO stage 2", "set zero_optimization.stage to 0"],
        ),
        (ONE_BIT, {"gradient_clip_val": 1.0}, ["OneBitAdam", "leave gradient_clip_val out"]),
    ],
)
def test_a_contradiction_is_one_line(config, options, phrases):
    (line,) = problems(config=config, trainer=options)
    assert all(phrase in line for phrase in phrases), line


def test_what_agrees_is_taken():
    config = {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": False},
    }
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "global_batch_size": 64}
    assert problems(config=config, trainer=options) == []


@pytest.mark.parametrize(
    ("strategy", "options", "text"),
    [
        ("deepspeed", {"stage": 4}, "stage=4: expected Literal[0, 1, 2, 3]"),
        ("deepspeed", {"offload_parameters": True}, "stage 2 does not shard them; use 3"),
        ("deepspeed", {"stage": 0, "offload_optimizer": True}, "stage 0 shards nothing"),
        ("deepspeed", {"reduce_bucket_size": 0}, "expected int >= 1"),
        ("deepspeed_stage_2", {"stage": 3}, "options.stage is set by the strategy's name"),
        ("deepspeed_stage_2", {"config": {}}, "zero_optimization.stage=0"),
        ("deepspeed_stage_4", {}, "is unknown; did you mean"),
    ],
)
def test_options_that_cannot_be(strategy, options, text):
    (line,) = problems(strategy, **options)
    assert text in line


@pytest.mark.needs("deepspeed")
def test_what_deepspeed_itself_does_not_take_is_said_before_anything_starts():
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}}
    line = "reduce_bucket_size in the DeepSpeed configuration: Input should be greater than 0"
    assert problems(config=config) == [line]
    assert "has been removed" in problems(config={"elasticity": {"enabled": True}})[0]


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        ({"optimizer": "two"}, None, "configure_optimizers gave 2 optimizers, and DeepSpeed steps"),
        (
            {"schedule": True},
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}},
            "give a scheduler there too",
        ),
    ],
)
def test_one_optimizer_with_one_scheduler(arguments, config, message):
    module: Any = make_subject(**arguments)
    read = lambda: read_optimization(module.configure_optimizers())  # noqa: E731
    with pytest.raises(ConfigurationError, match=message):
        optimizers.configured(config or {}, module, read)


@pytest.mark.needs("deepspeed")
def test_a_module_s_optimizers_are_not_asked_for_before_its_fit(monkeypatch):
    module = make_subject()
    monkeypatch.setattr(type(module), "configure_optimizers", lambda _: pytest.fail("was called"))
    made = trainer.Trainer(accelerator="cpu", devices=2, max_steps=1, strategy="deepspeed")
    made.check_fit(module)


def test_an_optimizer_that_cannot_be_sharded_is_refused():
    optimization = Optimization([torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])], [])
    stage_2: Mapping[str, Any] = {"zero_optimization": {"stage": 2}}
    (line,) = optimizers.problems_of(optimization, stage_2)
    assert line.startswith("configure_optimizers gave LBFGS, which uses other elements than")
    assert optimizers.problems_of(optimization, {}) == []
    untested = {**stage_2, "zero_allow_untested_optimizer": True}
    (line,) = optimizers.problems_of(optimization, untested)  # it keeps the parameters themselves
    assert "LBFGS, which has a state before its first step, and ZeRO replaces" in line
