"""What would have no effect is refused, or said: options, monitors, optimizers, losses, YAML."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.callbacks import BestCheckpoint, EarlyStopping
from my_project_trainer.cli import config_files
from my_project_trainer.errors import ConfigurationError, UserError
from tests.conformance.horovod_rows import horovodrun
from tests.project import run
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

from configuration_subject import CPU, DIGITS, mistakes, read
from fitting import fits

UNREACHED = (
    "the loss of training_step depends on no parameter of the optimizers: compute it from the "
    "module's own parameters"
)
STEP: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 1}


class Net(TrainingModule):
    """A layer; what its methods return may be given."""

    def __init__(
        self,
        optimizers: Callable[["Net"], Any] = lambda module: SGD(module.parameters(), lr=0.1),
        loss: Callable[["Net", Tensor], Any] = lambda module, x: module.layer(x).sum(),
        validation: Any = None,
    ) -> None:
        super().__init__()
        self.layer, self.second = nn.Linear(2, 1), nn.Linear(2, 1)
        self.functions = optimizers, loss, validation
        self.loose = [nn.Parameter(torch.ones(3, 4))]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.functions[1](self, batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def configure_optimizers(self) -> Any:
        return self.functions[0](self)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)

    def val_dataloader(self) -> Any:
        return self.functions[2] or []


LOADER: Any = DataLoader(TensorDataset(torch.ones(2, 2)))


def fit(folder: Path, module: Net, validation: Any = None, **options: Any) -> Trainer:
    defaults = {**STEP, "loggers": [], "default_root_dir": folder, **options}
    made = Trainer(**defaults)
    made.fit(module, module.train_dataloader(), validation)
    return made


def refused(work: Callable[[], Any]) -> list[str]:
    with pytest.raises(UserError) as caught:
        work()
    return caught.value.problems


def test_options_that_need_another_one_are_refused_together() -> None:
    lines = refused(
        lambda: Trainer(
            **STEP,
            learning_rate_warmup_steps=3,
            reference_batch_size=8,
            gradient_clip_algorithm="value",
            auto_select_gpus=True,
        )
    )
    assert sorted(lines) == [
        "auto_select_gpus=True has no effect: it selects idle GPUs if devices is their number; "
        "leave it out",
        "gradient_clip_algorithm='value' has no effect: gradient_clip_val is not given; leave it "
        "out",
        "learning_rate_warmup_steps=3 has no effect: learning_rate_scaling is 'none'; leave it out",
        "reference_batch_size=8 has no effect: learning_rate_scaling is 'none'; leave it out",
    ]


def test_options_that_have_an_effect_are_not_refused() -> None:
    scaled = {"learning_rate_scaling": "sqrt", "reference_batch_size": 8}
    clipped = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    Trainer(**STEP, **scaled, **clipped, learning_rate_warmup_steps=3, sanity_check=0)


def test_options_of_a_validation_are_refused_without_one(tmp_path: Path) -> None:
    options = {"sanity_check": 3, "val_every_n_steps": 1, "check_val_every_n_epoch": 2}
    callbacks = [EarlyStopping("val_loss"), BestCheckpoint("val_loss")]
    why = "this fit has no validation; leave it out"
    expected = [f"{name}={value} has no effect: {why}" for name, value in options.items()]
    expected += [
        f"{type(callback).__name__}: it monitors 'val_loss' in validations, and {why}"
        for callback in callbacks
    ]
    for more in ({}, {"limit_val_batches": 0}):
        validation = LOADER if more else None
        settings = {**options, **more, "callbacks": callbacks}
        lines = refused(lambda g=settings, v=validation: fit(tmp_path, Net(), v, **g))
        assert sorted(lines) == sorted(expected)
    fit(tmp_path, Net(), LOADER, **options, callbacks=callbacks)
    fit(tmp_path, Net(), sanity_check=0)


def test_join_is_refused_for_a_loader_in_the_trainer_s_order(tmp_path: Path) -> None:
    why = "the trainer gives each rank the same number of batches of this loader; leave it out"
    line = f"uneven_inputs='join' has no effect: {why}"
    assert refused(lambda: fit(tmp_path, Net(), uneven_inputs="join")) == [line]
    fit(tmp_path, Net(), uneven_inputs="join", use_distributed_sampler=False)


def test_a_global_batch_is_refused_for_a_loader_that_is_read_as_it_is(tmp_path: Path) -> None:
    settings = {"global_batch_size": 4, "use_distributed_sampler": False}
    line = "global_batch_size=4 has no effect: the training loader is read as it is; leave it out"
    assert refused(lambda: fit(tmp_path, Net(), **settings)) == [line]


def test_a_monitored_value_that_validation_never_logs_is_refused(tmp_path, capsys):
    """By its name it is a value of validation; others may be logged by training."""
    line = "EarlyStopping monitors {!r}, which validation does not log; {}"
    typo = refused(lambda: fit(tmp_path, Net(), LOADER, callbacks=[EarlyStopping("val_los")]))
    assert typo == [line.format("val_los", "did you mean 'val_loss'?")]
    assert capsys.readouterr().err == ""
    other = refused(lambda: fit(tmp_path, Net(), LOADER, callbacks=[EarlyStopping("other")]))
    assert other[0].startswith("EarlyStopping: no value is logged as 'other'")
    assert "note: " + line.format("other", "known: val_loss") in capsys.readouterr().err
    fit(tmp_path, Net(), LOADER, callbacks=[EarlyStopping("val_loss")])
    assert "note: " not in capsys.readouterr().err


def twice(module: Net) -> list[Optimizer]:
    same = SGD(module.parameters(), lr=0.1)
    return [same, same]


def two(module: Net) -> list[Optimizer]:
    return [SGD(module.parameters(), lr=0.1), Adam(module.second.parameters(), lr=0.1)]


def other_scheduler(module: Net) -> Any:
    first, second = SGD(module.parameters(), lr=0.1), SGD(module.parameters(), lr=0.1)
    return [first], [ChainedScheduler([StepLR(second, 1)])]


SHARED = (
    "has parameters of optimizer 0 too, and both would step them: give each parameter to one "
    "optimizer, or use manual optimization"
)


@pytest.mark.parametrize(
    ("optimizers", "line"),
    [
        (
            lambda module: SGD([*module.parameters(), *module.loose], lr=0.1),
            "optimizer 0 (SGD) has a parameter of shape (3, 4) that is not one of Net, and is "
            "neither moved nor saved: make it an attribute",
        ),
        (twice, f"optimizer 1 (SGD) {SHARED}"),
        (two, f"optimizer 1 (Adam) {SHARED}"),
        (
            other_scheduler,
            "ChainedScheduler is of an optimizer that is not returned, and changes no rate: return "
            "both",
        ),
    ],
)
def test_optimizers_that_do_not_train_the_module_are_refused(tmp_path, optimizers, line):
    assert refused(lambda: fit(tmp_path, Net(optimizers))) == [f"configure_optimizers: {line}"]


def test_manual_optimizers_may_share_parameters(tmp_path: Path) -> None:
    class Manual(Net):
        automatic_optimization = False

    fit(tmp_path, Manual(two, lambda module, x: None))


@pytest.mark.parametrize("strategy", ["single_device", "dp", "fsdp"])
def test_a_loss_that_no_parameter_reaches_is_refused(tmp_path: Path, strategy: str) -> None:
    def loss(module: Net, x: Tensor) -> Tensor:
        return x.requires_grad_().square().sum()

    module = Net(loss=loss)
    assert refused(lambda: fit(tmp_path, module, strategy=strategy)) == [UNREACHED]


def engine(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow, pytest.mark.needs(name)]


@pytest.mark.parametrize(
    ("names", "by", "how"),
    [
        ("ddp ddp-manual ddp_zero1 fsdp fsdp-manual fsdp-unused tensor_parallel", (), "torch"),
        pytest.param("ddp_sharded ddp_sharded-manual", (), "fairscale", marks=engine("fairscale")),
        pytest.param(
            "deepspeed_stage_1 deepspeed_stage_2 deepspeed_stage_3",
            *((), "deepspeed"),
            marks=engine("deepspeed"),
        ),
        pytest.param("horovod", horovodrun(2), "torch", marks=engine("horovod")),
    ],
)
def test_a_loss_that_no_parameter_reaches_is_refused_on_each_rank(tmp_path, names, by, how):
    outcomes = fits(tmp_path, [unreached(name) for name in names.split()], by=by, engine=how)
    assert outcomes == [dict.fromkeys(names.split(), UNREACHED)] * 2


@pytest.mark.slow
def test_a_worker_of_a_server_whose_loss_no_parameter_reaches_ends_all(tmp_path: Path) -> None:
    done = run(["-m", "fitting", tmp_path, json.dumps([unreached("parameter_server")])])
    assert done.returncode == 2, done.stderr
    assert UNREACHED in done.stderr
    assert "Traceback" not in done.stderr


def unreached(name: str) -> dict[str, Any]:
    """The run of STRATEGY[-manual|-unused]."""
    strategy, _, variant = name.partition("-")
    module = {"module": "skipping_subject.Unreached", "init": {"manual": variant == "manual"}}
    unused = {"strategy_options": {"find_unused_parameters": True}} if variant == "unused" else {}
    return {"name": name, **module, "devices": 2, "strategy": strategy, "max_steps": 1, **unused}


@pytest.mark.parametrize(
    ("text", "value"),
    [("12:30:45", 45045), ("1:30", 90), ("017", 15), ("-010", -8), ("1:30.5", 90.5)],
)
def test_numbers_that_yaml_reads_otherwise_are_refused_in_files(tmp_path, text, value):
    file = tmp_path / "a.yaml"
    file.write_text(f"trainer:\n  default_root_dir: {text}\n")
    advice = "quote it, or write the number"
    line = f"--config {file}: line 2: {text} would be read as {value}; {advice}"
    assert mistakes(*DIGITS, "--config", file) == [line]
    file.write_text(f"trainer:\n  default_root_dir: '{text}'\n")
    assert read(*DIGITS, *CPU, "--config", file).trainer._plan.options.default_root_dir == text


def test_such_numbers_are_text_on_the_command_line() -> None:
    for text in ("12:30:45", "017"):
        assert config_files.word("--trainer.default_root_dir", text) == text
        configured = read(*DIGITS, *CPU, f"--trainer.default_root_dir={text}")
        assert configured.trainer._plan.options.default_root_dir == text
    with pytest.raises(ConfigurationError, match="line 1: 017 would be read as 15"):
        config_files.word("--model.sizes", "[1, 017]")
    for text, value in (("10", 10), ("0", 0), ("0x1F", 31), ("00:30", "00:30"), ("0.5", 0.5)):
        assert config_files.word("--model.size", text).meaning == value
