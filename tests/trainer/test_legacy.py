"""Older and newer spellings of the trainer's arguments mean what their documents say."""

import contextlib
import inspect
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
from my_project_trainer.cli import configuration
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch.devices import parse_devices
from my_project_trainer.legacy import arguments as legacy
from my_project_trainer.strategies import SingleDevice

GPUS = 8
NEWER = {
    name: parameter.default
    for name, parameter in inspect.signature(trainer.Trainer).parameters.items()
}
K = 2  # for the documents' gpus=k


class Model(trainer.TrainingModule):
    """A model for the command line."""


OBJECT = SingleDevice()  # a strategy object, which plugins accepts


def translate(**given: Any) -> dict[str, Any]:
    translated: dict[str, Any] = NEWER | legacy.translate(given)
    assert translated.keys() == NEWER.keys()
    return translated


def layout(**given: Any) -> tuple[str, list[int], Any, int | None]:
    """Accelerator, device indices, strategy and nodes, on a machine with 8 GPUs."""
    translated = translate(**given)
    available = None if translated["accelerator"] == "cpu" else GPUS
    indices = parse_devices(translated["devices"], available)
    return translated["accelerator"], indices, translated["strategy"], translated["num_nodes"]


def refusal(**given: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        legacy.translate(given)
    problems: list[str] = raised.value.problems
    return problems


ALL = list(range(GPUS))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # GPU training (FAQ): "How should I adjust the batch size when using multiple devices?"
        ({"accelerator": "gpu", "devices": 1}, ("gpu", [0], "auto", None)),
        ({"accelerator": "gpu", "devices": 8, "strategy": "ddp"}, ("gpu", ALL, "ddp", None)),
        (
            {"accelerator": "gpu", "devices": 8, "num_nodes": 10, "strategy": "ddp"},
            ("gpu", ALL, "ddp", 10),
        ),
        # "How do I use multiple GPUs on Jupyter or Colab notebooks?"
        (
            {"accelerator": "gpu", "devices": 4, "strategy": "ddp_notebook"},
            ("gpu", [0, 1, 2, 3], "ddp_notebook", None),
        ),
        # "Select GPU devices"
        ({"gpus": [0, 1]}, ("gpu", [0, 1], "auto", None)),
        ({"gpus": "0, 1"}, ("gpu", [0, 1], "auto", None)),
        ({"gpus": -1}, ("gpu", ALL, "auto", None)),
        ({"gpus": "-1"}, ("gpu", ALL, "auto", None)),
        # "Data Parallel"
        ({"gpus": 2, "accelerator": "dp"}, ("gpu", [0, 1], "dp", None)),
        # "Distributed Data Parallel"
        ({"gpus": 8, "accelerator": "ddp"}, ("gpu", ALL, "ddp", None)),
        ({"gpus": 8, "accelerator": "ddp", "num_nodes": 4}, ("gpu", ALL, "ddp", 4)),
        # "Distributed Data Parallel 2"
        ({"gpus": 8, "accelerator": "ddp2", "num_nodes": 4}, ("gpu", ALL, "ddp2", 4)),
        # "Distributed Data Parallel Spawn"
        ({"gpus": 8, "accelerator": "ddp_spawn"}, ("gpu", ALL, "ddp_spawn", None)),
        # "Horovod": on GPUs, one a process; on CPUs, one process for each that horovodrun starts
        ({"accelerator": "horovod", "gpus": 1}, ("gpu", [0], "horovod", None)),
        ({"accelerator": "horovod"}, ("cpu", [0], "horovod", None)),
        # "Distributed Modes": TPUs; cores were counted from 1
        ({"tpu_cores": 8}, ("tpu", ALL, "xla", None)),
        ({"tpu_cores": [1]}, ("tpu", [0], "xla", None)),
        # "Distributed and 16-bit precision"
        ({"gpus": 1, "precision": 16}, ("gpu", [0], "auto", None)),
        ({"gpus": K, "accelerator": "dp"}, ("gpu", [0, 1], "dp", None)),
        ({"gpus": K, "accelerator": "ddp"}, ("gpu", [0, 1], "ddp", None)),
        ({"gpus": K, "accelerator": "ddp", "precision": 16}, ("gpu", [0, 1], "ddp", None)),
        # "Sharded Training", "across all DDP variants"
        ({"accelerator": "ddp", "plugins": "ddp_sharded"}, ("auto", ALL, "ddp_sharded", None)),
        (
            {"gpus": 4, "accelerator": "ddp_spawn", "plugins": "ddp_sharded"},
            ("gpu", [0, 1, 2, 3], "ddp_sharded_spawn", None),
        ),
        # "DeepSpeed"
        (
            {"gpus": 4, "plugins": "deepspeed", "precision": 16},
            ("gpu", [0, 1, 2, 3], "deepspeed", None),
        ),
        ({"gpus": 4, "plugins": OBJECT}, ("gpu", [0, 1, 2, 3], OBJECT, None)),
        # "Batch size": accelerator='ddp|horovod' stands for either
        ({"gpus": 8, "accelerator": "horovod"}, ("gpu", ALL, "horovod", None)),
        ({"gpus": 8, "num_nodes": 10, "accelerator": "ddp"}, ("gpu", ALL, "ddp", 10)),
        ({"gpus": 8, "num_nodes": 10, "accelerator": "horovod"}, ("gpu", ALL, "horovod", 10)),
        ({"gpus": 8, "accelerator": "ddp2"}, ("gpu", ALL, "ddp2", None)),
        ({"gpus": 8, "num_nodes": 10, "accelerator": "ddp2"}, ("gpu", ALL, "ddp2", 10)),
        # "Elastic training": ddp and ddp2, both above
        # Article on GPUs: "Data Parallel"
        (
            {"devices": 4, "accelerator": "gpu", "strategy": "dp"},
            ("gpu", [0, 1, 2, 3], "dp", None),
        ),
        # "Distributed Data Parallel"
        (
            {"devices": 8, "accelerator": "gpu", "strategy": "ddp", "num_nodes": 4},
            ("gpu", ALL, "ddp", 4),
        ),
        (
            {"devices": 8, "accelerator": "gpu", "strategy": "ddp_spawn"},
            ("gpu", ALL, "ddp_spawn", None),
        ),
        # "Distributed Data Parallel 2"
        (
            {"devices": 8, "accelerator": "gpu", "strategy": "ddp2", "num_nodes": 4},
            ("gpu", ALL, "ddp2", 4),
        ),
        # "Horovod"; the second is said to be for CPUs, but asks for GPUs, and so gets all of them
        (
            {"accelerator": "gpu", "strategy": "horovod", "devices": 1},
            ("gpu", [0], "horovod", None),
        ),
        ({"accelerator": "gpu", "strategy": "horovod"}, ("gpu", ALL, "horovod", None)),
        # "Sharded training"
        ({"accelerator": "gpu", "strategy": "ddp_sharded"}, ("gpu", ALL, "ddp_sharded", None)),
    ],
)
def test_a_snippet_of_the_documents_means_its_layout(given: Any, expected: Any) -> None:
    assert layout(**given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # "Remove samplers"
        ({"replace_sampler_ddp": False}, {"use_distributed_sampler": False}),
        # "Distributed and 16-bit precision", "DeepSpeed"
        ({"gpus": 1, "precision": 16}, {"precision": "16-mixed"}),
        # "Mixed Precision (16-bit) Training"
        ({"precision": 16, "amp_backend": "native"}, {"precision": "16-mixed"}),
        # "Monitor the training": max_epochs beside a logger
        ({"max_epochs": 10, "logger": "csv"}, {"max_epochs": 10, "loggers": ["csv"]}),
    ],
)
def test_a_snippet_of_the_documents_means_its_setting(given: Any, expected: Any) -> None:
    assert expected.items() <= translate(**given).items()


def test_snippets_that_cannot_be_run_say_why() -> None:
    # "Mixed Precision (16-bit) Training"
    assert refusal(amp_backend="apex", precision=16) == [
        "amp_backend='apex': use 'native'; apex has no mixed precision"
    ]

    # "Monitor the training with neptune.ai"
    class NeptuneLogger:
        pass

    with pytest.raises(ConfigurationError, match=r"loggers\[0\]=<NeptuneLogger>: give a Logger, "):
        trainer.Trainer(max_epochs=10, logger=NeptuneLogger())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # "Distributed Data Parallel Spawn", "DeepSpeed", and the runs of the sequential example
        (["--accelerator", "ddp", "--gpus", "8"], ("gpu", ALL, "ddp", None)),
        (
            ["--plugins", "deepspeed", "--precision", "16", "--gpus", "4"],
            ("gpu", [0, 1, 2, 3], "deepspeed", None),
        ),
        (["--plugins", "deepspeed"], ("auto", ALL, "deepspeed", None)),
        (["--gpus", "2", "--accelerator", "ddp"], ("gpu", [0, 1], "ddp", None)),
        (["--gpus", "1"], ("gpu", [0], "auto", None)),
        # What a shell can say besides
        (["--gpus", "0,1"], ("gpu", [0, 1], "auto", None)),
        (["--gpus", "[1, 3]"], ("gpu", [1, 3], "auto", None)),
        (["--gpus=-1"], ("gpu", ALL, "auto", None)),
        (["--gpus=null"], ("cpu", [0], "auto", None)),
        (["--gpus=3,"], ("gpu", [3], "auto", None)),
        ([], ("auto", ALL, "auto", None)),
    ],
)
def test_the_command_line_tells_given_from_not_given(
    words: list[str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [f"--trainer.{word[2:]}" if word.startswith("--") else word for word in words]
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(configuration, "Trainer", lambda **options: made.append(options))
    with contextlib.suppress(AttributeError):
        configuration.read_work("program", "fit", ["--model", "test_legacy.Model", *given])
    assert layout(**made[0]) == expected


REFUSED = None


@pytest.mark.parametrize(
    ("value", "older", "newer"),
    [
        (0, ("cpu", [0]), REFUSED),
        (3, ("gpu", [0, 1, 2]), [0, 1, 2]),
        (-1, ("gpu", ALL), ALL),
        ("-1", ("gpu", ALL), ALL),
        ([0], ("gpu", [0]), [0]),
        ("0,", ("gpu", [0]), [0]),
        ("0", ("gpu", [0]), REFUSED),
        ("3", ("gpu", [3]), [0, 1, 2]),
        ([1, 3], ("gpu", [1, 3]), [1, 3]),
        ("1, 3", ("gpu", [1, 3]), [1, 3]),
        (None, ("cpu", [0]), ALL),
        ("auto", REFUSED, ALL),
        ([1, 1], REFUSED, REFUSED),
        ("1,1", REFUSED, REFUSED),
        (-2, REFUSED, REFUSED),
        ("-2", REFUSED, REFUSED),
        ([0, -1], REFUSED, REFUSED),
        ([8], REFUSED, REFUSED),
        ("8", REFUSED, ALL),
        (9, REFUSED, REFUSED),
        (True, REFUSED, REFUSED),
        (2.0, REFUSED, REFUSED),
        ("two", REFUSED, REFUSED),
        ({0}, REFUSED, REFUSED),
        ({"0": 1}, REFUSED, REFUSED),
        ("1, x", REFUSED, REFUSED),
    ],
)
def test_the_table_of_device_spellings(value: Any, older: Any, newer: Any) -> None:
    if older is REFUSED:
        with pytest.raises(ConfigurationError, match=r"^(gpus|devices)="):
            layout(gpus=value)
    else:
        assert layout(gpus=value)[:2] == older
    if newer is REFUSED:
        with pytest.raises(ConfigurationError, match=r"^devices="):
            layout(devices=value, accelerator="gpu")
    else:
        assert layout(devices=value, accelerator="gpu")[:2] == ("gpu", newer)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"accelerator": "ddp"}, ("auto", ALL, "ddp", None)),
        ({"accelerator": "ddp", "devices": 2}, ("auto", [0, 1], "ddp", None)),
        ({"accelerator": "horovod", "devices": 2}, ("auto", [0, 1], "horovod", None)),
        ({"gpus": 0, "accelerator": "cpu"}, ("cpu", [0], "auto", None)),
        ({"gpus": 2, "accelerator": "gpu"}, ("gpu", [0, 1], "auto", None)),
        ({"gpus": 2, "accelerator": "cuda"}, ("cuda", [0, 1], "auto", None)),
        ({"gpus": 2, "strategy": "fsdp"}, ("gpu", [0, 1], "fsdp", None)),
        ({"tpu_cores": [5]}, ("tpu", [4], "xla", None)),
        ({"tpu_cores": 1, "accelerator": "tpu"}, ("tpu", [0], "xla", None)),
        ({"gpus": 2, "plugins": ["ddp_sharded"]}, ("gpu", [0, 1], "ddp_sharded", None)),
        (
            {"gpus": 2, "accelerator": "ddp", "plugins": "deepspeed"},
            ("gpu", [0, 1], "deepspeed", None),
        ),
    ],
)
def test_other_older_spellings(given: Any, expected: Any) -> None:
    assert layout(**given) == expected


def test_an_unknown_accelerator_is_left_to_who_looks_for_it() -> None:
    translated = translate(gpus=2, accelerator="gpus")
    assert (translated["accelerator"], translated["devices"]) == ("gpus", 2)


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (16, "16-mixed"),
        ("16", "16-mixed"),
        (32, "32-true"),
        ("32", "32-true"),
        ("bf16", "bf16-mixed"),
        ("16-true", "16-true"),
        ("bf16-mixed", "bf16-mixed"),
        ("17-mixed", "17-mixed"),  # what is wrong with it, precision.py says
    ],
)
def test_a_precision_in_bits_is_a_format(precision: Any, name: str) -> None:
    assert translate(precision=precision)["precision"] == name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"replace_sampler_ddp": True}, {"use_distributed_sampler": True}),
        ({"resume_from_checkpoint": "runs/a"}, {"resume": "runs/a"}),
        ({"resume_from_checkpoint": Path("runs/a")}, {"resume": str(Path("runs/a"))}),
        ({"logger": True}, {"loggers": ("csv", "tensorboard")}),
        ({"logger": False}, {"loggers": ()}),
        ({"logger": ["csv"]}, {"loggers": ["csv"]}),
        ({"num_sanity_val_steps": 0}, {"sanity_check": 0}),
    ],
)
def test_a_renamed_argument_keeps_its_value(given: Any, expected: Any) -> None:
    assert expected.items() <= translate(**given).items()


def test_newer_values_pass_untouched() -> None:
    given = NEWER | {
        "accelerator": "gpu",
        "devices": [0, 3],
        "num_nodes": 2,
        "strategy": OBJECT,
        "precision": "bf16-mixed",
        "use_distributed_sampler": False,
        "resume": "auto",
        "loggers": ["csv"],
    }
    assert legacy.translate(given) == given
    assert legacy.translate(NEWER) == NEWER
    assert legacy.translate({"accelerator": "gpu"}) == {"accelerator": "gpu"}
    nothing = dict.fromkeys(name for name in legacy.TYPES if name != "gpus")
    assert legacy.translate(NEWER | nothing) == NEWER
