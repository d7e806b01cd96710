"""Older and newer spellings of the trainer's arguments mean what their documents say."""

import contextlib
import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import my_project_trainer as trainer
import pytest
from my_project_trainer.cli import configuration
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch.devices import parse_devices
from my_project_trainer.legacy import arguments as legacy
from my_project_trainer.strategies import SingleDevice

GPUS = 8
OPTIONS = inspect.signature(trainer.Trainer).parameters
NEWER = {name: option.default for name, option in OPTIONS.items()}


class Model(trainer.TrainingModule):
    """A model for the command line."""


OBJECT = SingleDevice()  # a strategy object, which plugins accepts


def translate(**options: Any) -> dict[str, Any]:
    translated: dict[str, Any] = NEWER | legacy.translate(options)
    assert translated.keys() == NEWER.keys()
    return translated


def layout(**options: Any) -> tuple[str, list[int], Any, int | None]:
    """Accelerator, device indices, strategy and nodes, on a machine with 8 GPUs."""
    translated = translate(**options)
    available = None if translated["accelerator"] == "cpu" else GPUS
    indices = parse_devices(translated["devices"], available)
    return translated["accelerator"], indices, translated["strategy"], translated["num_nodes"]


def refusal(**options: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        legacy.translate(options)
    problems: list[str] = raised.value.problems
    return problems


ALL = list(range(GPUS))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # What the documents' snippets say; newer spellings pass untouched, as is tested below.
        ({"gpus": 2, "accelerator": "dp"}, ("gpu", [0, 1], "dp", None)),
        ({"gpus": 8, "accelerator": "ddp", "num_nodes": 4}, ("gpu", ALL, "ddp", 4)),
        ({"gpus": 8, "accelerator": "ddp2", "num_nodes": 4}, ("gpu", ALL, "ddp2", 4)),
        ({"gpus": 8, "accelerator": "ddp_spawn"}, ("gpu", ALL, "ddp_spawn", None)),
        # "Horovod": on GPUs, one a process; on CPUs, one process for each that horovodrun starts
        ({"accelerator": "horovod", "gpus": 1}, ("gpu", [0], "horovod", None)),
        ({"accelerator": "horovod"}, ("cpu", [0], "horovod", None)),
        # It is said to be for CPUs, but asks for GPUs, and so gets all of them.
        ({"accelerator": "gpu", "strategy": "horovod"}, ("gpu", ALL, "horovod", None)),
        # "Distributed Modes": TPUs; cores were counted from 1
        ({"tpu_cores": 8}, ("tpu", ALL, "xla", None)),
        ({"tpu_cores": [5]}, ("tpu", [4], "xla", None)),
        # "Sharded Training", "across all DDP variants"
        ({"accelerator": "ddp", "plugins": "ddp_sharded"}, ("auto", ALL, "ddp_sharded", None)),
        (
            {"gpus": 2, "accelerator": "ddp_spawn", "plugins": "ddp_sharded"},
            ("gpu", [0, 1], "ddp_sharded_spawn", None),
        ),
        # "DeepSpeed"
        ({"gpus": 2, "plugins": "deepspeed"}, ("gpu", [0, 1], "deepspeed", None)),
        ({"gpus": 2, "plugins": OBJECT}, ("gpu", [0, 1], OBJECT, None)),
        # What else can be said
        ({"accelerator": "ddp", "devices": 2}, ("auto", [0, 1], "ddp", None)),
        ({"accelerator": "horovod", "devices": 2}, ("auto", [0, 1], "horovod", None)),
        ({"gpus": 0, "accelerator": "cpu"}, ("cpu", [0], "auto", None)),
        ({"gpus": 2, "accelerator": "cuda"}, ("cuda", [0, 1], "auto", None)),
        ({"gpus": 2, "strategy": "fsdp"}, ("gpu", [0, 1], "fsdp", None)),
        ({"tpu_cores": 1, "accelerator": "tpu"}, ("tpu", [0], "xla", None)),
        ({"gpus": 2, "plugins": ["ddp_sharded"]}, ("gpu", [0, 1], "ddp_sharded", None)),
    ],
)
def test_an_older_spelling_means_its_layout(options: Any, expected: Any) -> None:
    assert layout(**options) == expected


def test_a_logger_of_the_documents_that_is_not_here_says_why() -> None:
    # "Monitor the training with neptune.ai"
    class NeptuneLogger:
        pass

    with pytest.raises(ConfigurationError, match=r"loggers\[0\]=<NeptuneLogger>: give a Logger, "):
        trainer.Trainer(max_epochs=10, logger=NeptuneLogger())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--plugins", "deepspeed"], ("auto", ALL, "deepspeed", None)),
        (["--gpus", "2", "--accelerator", "ddp"], ("gpu", [0, 1], "ddp", None)),
        # What a shell can say besides
        (["--gpus", "0,1"], ("gpu", [0, 1], "auto", None)),
        (["--gpus", "[1, 3]"], ("gpu", [1, 3], "auto", None)),
        (["--gpus=-1"], ("gpu", ALL, "auto", None)),
        (["--gpus=null"], ("cpu", [0], "auto", None)),
        (["--gpus=3,"], ("gpu", [3], "auto", None)),
        ([], ("auto", ALL, "auto", None)),
    ],
)
def test_the_command_line_tells_given_from_not_given(words, expected, monkeypatch):
    arguments = [f"--trainer.{word[2:]}" if word.startswith("--") else word for word in words]
    made: list[dict[str, Any]] = []
    noting = mock.Mock(side_effect=lambda **options: made.append(options))
    monkeypatch.setattr(configuration, "Trainer", noting)
    with contextlib.suppress(AttributeError):
        configuration.read_work("program", "fit", ["--model", "test_legacy.Model", *arguments])
    assert layout(**made[0]) == expected


REFUSED = None


@pytest.mark.parametrize(
    ("value", "older"),
    [
        (3, ("gpu", [0, 1, 2])),
        (-1, ("gpu", ALL)),
        ("1, 3", ("gpu", [1, 3])),
        # Other than of devices, whose spellings test_devices.py reads.
        (0, ("cpu", [0])),
        (None, ("cpu", [0])),
        ("0", ("gpu", [0])),
        ("3", ("gpu", [3])),
        *((value, REFUSED) for value in ("auto", [1, 1], -2, "8", 9, True, 2.0, "two", {0})),
    ],
)
def test_what_gpus_means(value: Any, older: Any) -> None:
    if older is REFUSED:
        with pytest.raises(ConfigurationError, match=r"^(gpus|devices)="):
            layout(gpus=value)
    else:
        assert layout(gpus=value)[:2] == older


def test_an_unknown_accelerator_is_left_to_who_looks_for_it() -> None:
    translated = translate(gpus=2, accelerator="gpus")
    assert (translated["accelerator"], translated["devices"]) == ("gpus", 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"replace_sampler_ddp": True}, {"use_distributed_sampler": True}),
        ({"precision": 16, "amp_backend": "native"}, {"precision": "16-mixed"}),
        ({"precision": "bf16"}, {"precision": "bf16-mixed"}),
        ({"precision": "32"}, {"precision": "32-true"}),
        ({"precision": "17-mixed"}, {"precision": "17-mixed"}),  # precision.py refuses it
        ({"resume_from_checkpoint": "runs/a"}, {"resume": "runs/a"}),
        ({"resume_from_checkpoint": Path("runs/a")}, {"resume": str(Path("runs/a"))}),
        ({"logger": True}, {"loggers": ("csv", "tensorboard")}),
        ({"logger": False}, {"loggers": ()}),
        ({"logger": ["csv"]}, {"loggers": ["csv"]}),
        ({"num_sanity_val_steps": 0}, {"sanity_check": 0}),
    ],
)
def test_a_renamed_argument_keeps_its_value(options: Any, expected: Any) -> None:
    assert expected.items() <= translate(**options).items()


def test_newer_values_pass_untouched() -> None:
    options = NEWER | {
        "accelerator": "gpu",
        "devices": [0, 3],
        "num_nodes": 2,
        "strategy": OBJECT,
        "precision": "bf16-mixed",
        "use_distributed_sampler": False,
        "resume": "auto",
        "loggers": ["csv"],
    }
    assert legacy.translate(options) == options
    assert legacy.translate(NEWER) == NEWER
    assert legacy.translate({"accelerator": "gpu"}) == {"accelerator": "gpu"}
    nothing = dict.fromkeys(name for name in legacy.TYPES if name != "gpus")
    assert legacy.translate(NEWER | nothing) == NEWER


ONE_STRATEGY = "each name a strategy; give only strategy"
ONE_DEVICE = "contradict each other; give accelerator and devices"
SPELLINGS = "are two spellings of one option; give only"


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ({"gpus": 8, "devices": 4}, "each select devices; give only devices"),
        ({"accelerator": "cpu", "gpus": 2}, ONE_DEVICE),
        ({"accelerator": "gpu", "gpus": 0}, ONE_DEVICE),
        ({"accelerator": "gpu", "gpus": None}, ONE_DEVICE),
        ({"accelerator": "gpu", "tpu_cores": 8}, ONE_DEVICE),
        ({"accelerator": "ddp", "strategy": "fsdp"}, ONE_STRATEGY),
        ({"accelerator": "dp", "plugins": "deepspeed"}, ONE_STRATEGY),
        ({"accelerator": "ddp_spawn", "plugins": "deepspeed"}, ONE_STRATEGY),
        ({"accelerator": "ddp", "plugins": "ddp_sharded", "strategy": "ddp"}, ONE_STRATEGY),
        ({"tpu_cores": 8, "strategy": "ddp"}, ONE_STRATEGY),
        ({"replace_sampler_ddp": True, "use_distributed_sampler": False}, SPELLINGS),
        ({"resume_from_checkpoint": "a", "resume": "b"}, SPELLINGS),
        ({"logger": False, "loggers": ["csv"]}, SPELLINGS),
    ],
)
def test_a_contradiction_is_refused_in_one_line(options: dict[str, Any], rest: str) -> None:
    said = " and ".join(f"{name}={value!r}" for name, value in options.items())
    newer = f" {list(options)[1]}" if rest == SPELLINGS else ""
    assert refusal(**options) == [f"{said} {rest}{newer}"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"gpus": True}, "gpus=True: expected int | str | list[int] | None"),
        ({"gpus": 1.5}, "gpus=1.5: expected int | str | list[int] | None"),
        ({"gpus": "auto"}, "gpus='auto': give a number, or indices"),
        ({"tpu_cores": 0}, "tpu_cores=0: give how many, or one as [1] to [8]"),
        ({"tpu_cores": True}, "tpu_cores=True: expected int | list[int] | None"),
        ({"tpu_cores": [9]}, "tpu_cores=[9]: give how many, or one as [1] to [8]"),
        ({"tpu_cores": [1, 8]}, "tpu_cores=[1, 8]: give how many, or one as [1] to [8]"),
        ({"plugins": []}, "plugins=[]: give one, or strategy in its place"),
        (
            {"plugins": [OBJECT], "strategy": "ddp"},
            f"plugins=[SingleDevice] and strategy='ddp' {ONE_STRATEGY}",
        ),
        ({"plugins": ["a", "b"]}, "plugins=['a', 'b']: give one, or strategy in its place"),
        ({"amp_backend": "amp"}, "amp_backend='amp': use 'native'; apex has no mixed precision"),
        ({"replace_sampler_ddp": 1}, "replace_sampler_ddp=1: expected bool | None"),
        (
            {"resume_from_checkpoint": 3},
            "resume_from_checkpoint=3: expected str | PathLike[str] | None",
        ),
    ],
)
def test_a_wrong_value_is_refused_and_named(options: Any, line: str) -> None:
    assert refusal(**options) == [line]


def test_everything_wrong_is_said_at_once() -> None:
    lines = refusal(gpus=8, devices=4, accelerator="ddp", strategy="fsdp", amp_backend="apex")
    assert [line.split("=")[0] for line in lines] == ["accelerator", "gpus", "amp_backend"]
