"""Plugins of older trainers mean a strategy and its options, and run as their documents say."""

import json
import shutil
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer import Logger, Trainer, TrainingModule, legacy, strategies
from my_project_trainer.errors import ConfigurationError
from test_legacy import layout, refusal, translate
from tests.conformance.rows import ROUNDING
from tests.project import run, succeed

from legacy_subject import Extended, Model, NotWrapped
from processes import at_root


def plugin(name: str, *arguments: Any, **options: Any) -> Any:
    """A plugin by the name of its class."""
    cls = getattr(legacy, name)
    if cls.strategy not in strategies.names():
        pytest.skip(f"the folder of {cls.strategy} was deleted")
    return cls(*arguments, **options)


UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": 5}
OWN = {"config": {"zero_optimization": {"stage": 2}}}
SIZES = {"allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8}
OFFLOAD = {"offload_optimizer": True}
PIPELINE = {"microbatches": 8, "checkpoint": "except_last"}


@pytest.mark.parametrize(
    ("name", "options", "strategy", "expected"),
    [
        ("DDPPlugin", {}, "ddp", {}),
        ("DDPPlugin", UNUSED, "ddp", UNUSED),
        # "By default we enable ZeRO-Offload."
        ("DeepSpeedPlugin", {}, "deepspeed", OFFLOAD),
        (
            *("DeepSpeedPlugin", SIZES, "deepspeed"),
            {**OFFLOAD, **dict.fromkeys(SIZES, 500_000_000)},
        ),
        (
            *("DeepSpeedPlugin", {"cpu_offload": False, "stage": 3}, "deepspeed"),
            {"offload_optimizer": False, "stage": 3},
        ),
        # "Custom DeepSpeed Config": "All plugin default parameters will be ignored"
        ("DeepSpeedPlugin", OWN, "deepspeed", OWN),
        ("DeepSpeedPlugin", {"config": "a.json"}, "deepspeed", {"config": "a.json"}),
        # "Sequential Model Parallelism with Checkpointing"
        (
            "RPCSequentialPlugin",
            {"balance": [1, 1, 1, 1]},
            "sequential",
            {"stages": 4, "balance": [1, 1, 1, 1], **PIPELINE},
        ),
        ("RPCSequentialPlugin", {}, "sequential", {"balance": "memory", **PIPELINE}),
    ],
)
def test_a_plugin_means_a_strategy_and_its_options(name, options, strategy, expected):
    declared = plugin(name, **options)
    for way in ({"plugins": declared}, {"plugins": [declared]}):
        translated = translate(**way)
        assert (translated["strategy"], translated["strategy_options"]) == (strategy, expected)
    assert all(type(translated["strategy_options"][key]) is type(expected[key]) for key in expected)


def test_the_first_argument_of_deepspeed_is_its_configuration() -> None:
    translated = translate(plugins=plugin("DeepSpeedPlugin", OWN["config"]))
    assert translated["strategy_options"] == OWN


def test_a_string_means_the_same_as_its_plugin() -> None:
    made = translate(plugins=plugin("DeepSpeedPlugin"))
    assert translate(plugins="deepspeed") == translate(plugins=["deepspeed"]) == made
    assert made["strategy_options"]
    assert translate(strategy="deepspeed")["strategy_options"] is None


@pytest.mark.parametrize(
    ("name", "mode", "strategy"),
    [
        ("DDPPlugin", "ddp", "ddp"),
        ("DDPPlugin", "ddp_spawn", "ddp_spawn"),
        ("DeepSpeedPlugin", "ddp", "deepspeed"),
        ("RPCSequentialPlugin", "ddp", "sequential"),
    ],
)
def test_a_mode_and_a_plugin_mean_one_strategy(name: str, mode: str, strategy: str) -> None:
    arguments = {"accelerator": mode, "gpus": 4, "plugins": [plugin(name)]}
    assert layout(**arguments) == ("gpu", [0, 1, 2, 3], strategy, None)


def test_every_plugin_names_a_strategy_that_exists() -> None:
    for name in (plugin_name for plugin_name in legacy.__all__ if plugin_name.endswith("Plugin")):
        declared = type(plugin(name))
        strategies.create(
            *(translate(plugins=declared())[option] for option in ("strategy", "strategy_options"))
        )


class Hooked(legacy.DDPPlugin):
    """Overrides what a strategy's own methods do here."""

    def pre_dispatch(self) -> None:
        pass

    def reduce(self, tensor: Any) -> Any:
        return tensor


@pytest.mark.parametrize(
    ("make_options", "lines"),
    [
        (
            lambda: {"plugins": legacy.DDPPlugin(), "strategy": "fsdp"},
            ["plugins=DDPPlugin and strategy='fsdp' each name a strategy; give only strategy"],
        ),
        (
            lambda: {"plugins": [legacy.DDPPlugin(), "ddp2"]},
            ["plugins=[DDPPlugin, 'ddp2']: give one, or strategy in its place"],
        ),
        (
            lambda: {"plugins": legacy.DDPPlugin(), "strategy_options": {"bucket_cap_mb": 5.0}},
            [
                "strategy_options={'bucket_cap_mb': 5.0} and DDPPlugin each set options of the "
                "strategy; give only one of them"
            ],
        ),
        (
            lambda: {"plugins": Hooked()},
            [
                f"Hooked.{name} would not be called; override a strategy's methods, in a class of "
                "your own that you give as strategy=…"
                for name in ("pre_dispatch", "reduce")
            ],
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(make_options: Any, lines: list[str]) -> None:
    assert refusal(**make_options()) == lines


def test_the_documents_1_bit_adam_with_stage_2_is_refused_with_the_reason() -> None:
    config = {
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 3e-5, "cuda_aware": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "zero_optimization": {"stage": 2, "cpu_offload": True, "reduce_bucket_size": 2e8},
    }
    declared = plugin("DeepSpeedPlugin", config)
    with pytest.raises(ConfigurationError, match=r"OneBitAdam .*ZeRO stage 2: it"):
        Trainer(plugins=declared, precision="bf16", accelerator="cpu", max_steps=1)  # type: ignore[call-arg]


def test_names_are_imported_from_where_the_documents_do() -> None:
    from my_project_trainer.legacy.loggers import WandbLogger
    from my_project_trainer.legacy.plugins import DeepSpeedPlugin
    from my_project_trainer.legacy.plugins.training_type.ddp import DDPPlugin
    from my_project_trainer.legacy.plugins.training_type.rpc_sequential import RPCSequentialPlugin

    classes = {DeepSpeedPlugin, DDPPlugin, RPCSequentialPlugin}
    assert classes == {getattr(legacy, cls.__name__) for cls in classes}
    assert issubclass(WandbLogger, Logger)
    with pytest.raises(ImportError, match="NeptuneLogger: its service closed on March 5, 2026; us"):
        from my_project_trainer.legacy.loggers import NeptuneLogger  # noqa: F401
    with pytest.raises(
        ConfigurationError, match="DeepSpeedPlugin: config replaces stage; set them"
    ):
        DeepSpeedPlugin({"steps_per_print": 1}, stage=2)


def test_a_hook_that_would_not_be_called_is_refused_where_its_class_is_made() -> None:
    hook = lambda self, *arguments: None  # noqa: E731
    body = {"optimizer_zero_grad": hook, "validation_epoch_end": hook, "training_step": hook}
    with pytest.raises(ConfigurationError) as raised:
        type("Net", (legacy.LightningModule,), body)
    first, second = raised.value.problems
    assert first.startswith("Net.optimizer_zero_grad would not be called: it is no hook; ")
    advice = "use on_validation_epoch_end"
    assert second == f"Net.validation_epoch_end would not be called: it is no hook; {advice}"
    with pytest.raises(ConfigurationError, match=r"Data\.transfer_batch_to_device would not be c"):
        type("Data", (legacy.LightningDataModule,), {"transfer_batch_to_device": hook})
    assert isinstance(Model(), TrainingModule)


def test_the_folder_can_be_deleted(tmp_path: Path) -> None:
    source = Path(trainer.__file__).parent
    copy = tmp_path / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "legacy"))
    check = (
        f"import {source.name} as t\n"
        "t.Trainer(accelerator='cpu', devices='2', strategy='ddp', max_steps=1)\n"
        "try: t.Trainer(gpus=0)\n"
        "except t.UserError as error: print(error)"
    )
    done = run(["-c", check], cwd=tmp_path, extra={"PYTHONPATH": str(tmp_path)})
    assert done.stderr == ""
    assert done.stdout.startswith("gpus: Trainer has no such argument; ")


def trained(folder: Path, plugin: str | None, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after a fit with a global batch of 4, on 2 processes if there is a plugin."""
    folder.mkdir()
    trainer_options: dict[str, Any] = {"global_batch_size": 4, "gpus": 0}
    if plugin is not None:
        trainer_options = {"global_batch_size": 4, "accelerator": "cpu", "devices": 2}
    arguments = json.dumps([trainer_options, plugin, options])
    succeed(["-m", "legacy_subject", arguments], cwd=folder, extra=at_root())
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return weights


@pytest.mark.slow
def test_overridden_methods_make_the_process_group_and_the_wrapper(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", None)
    overridden = trained(tmp_path / "own", "OwnDDP")
    extended = {"find_unused_parameters": True, "bucket_cap_mb": 5}
    added = trained(tmp_path / "extended", "Extended", **extended)
    for name, value in alone.items():
        assert (value - overridden[name]).abs().max() < ROUNDING
        assert (value - added[name]).abs().max() < ROUNDING
    for rank in (0, 1):
        for kind in ("own", "extended"):
            assert (tmp_path / kind / f"connected-{rank}").read_text() == "2"
        assert (tmp_path / "own" / f"wrapped-{rank}").exists()
        assert (tmp_path / "extended" / f"wrapped-{rank}").read_text() == "5"


@pytest.mark.slow
def test_a_module_is_divided_as_the_documents_say(tmp_path: Path) -> None:
    plugin("RPCSequentialPlugin")
    alone = trained(tmp_path / "alone", None)
    divided = trained(tmp_path / "divided", "RPCSequentialPlugin", balance=[2, 2])
    assert alone.keys() == divided.keys()
    assert max((value - divided[name]).abs().max() for name, value in alone.items()) < ROUNDING


def test_a_method_that_forgets_its_work_is_named(apart: None) -> None:
    from legacy_subject import Numbers

    cpu = {"accelerator": "cpu", "devices": 1, "logger": False}
    made = Trainer(plugins=NotWrapped(), max_steps=1, seed=1, **cpu)  # type: ignore[call-arg]
    with pytest.raises(
        Exception, match=r"NotWrapped\.configure_ddp must set self\.model to a Dist"
    ):
        made.fit(Model(), Numbers())


def test_methods_are_called_in_spawned_processes_too() -> None:
    options = {"accelerator": "ddp_spawn", "gpus": 2, "plugins": Extended()}
    made = translate(**options)["strategy"]
    assert (made.limits.launcher, made.limits.max_nodes) == ("spawn", 1)
