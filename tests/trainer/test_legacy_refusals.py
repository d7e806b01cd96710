"""Older spellings that contradict newer ones, or have wrong values, are refused in one line."""

from typing import Any

import pytest

from test_legacy import OBJECT, refusal


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"gpus": 8, "devices": 4},
            "gpus=8 and devices=4 each select devices; give only devices",
        ),
        (
            {"gpus": 2, "accelerator": "cpu"},
            "accelerator='cpu' and gpus=2 contradict each other; give accelerator and devices",
        ),
        (
            {"gpus": 0, "accelerator": "gpu"},
            "accelerator='gpu' and gpus=0 contradict each other; give accelerator and devices",
        ),
        (
            {"gpus": None, "accelerator": "gpu"},
            "accelerator='gpu' and gpus=None contradict each other; give accelerator and devices",
        ),
        (
            {"tpu_cores": 8, "accelerator": "gpu"},
            "accelerator='gpu' and tpu_cores=8 contradict each other; give accelerator and devices",
        ),
        (
            {"accelerator": "ddp", "gpus": 2, "strategy": "fsdp"},
            "accelerator='ddp' and strategy='fsdp' each name a strategy; give only strategy",
        ),
        (
            {"accelerator": "dp", "gpus": 2, "plugins": "deepspeed"},
            "accelerator='dp' and plugins='deepspeed' each name a strategy; give only strategy",
        ),
        (
            {"accelerator": "ddp_spawn", "gpus": 2, "plugins": "deepspeed"},
            "accelerator='ddp_spawn' and plugins='deepspeed' each name a strategy; give only "
            "strategy",
        ),
        (
            {"accelerator": "ddp", "gpus": 2, "plugins": "ddp_sharded", "strategy": "ddp"},
            "accelerator='ddp' and plugins='ddp_sharded' and strategy='ddp' each name a strategy; "
            "give only strategy",
        ),
        (
            {"plugins": [OBJECT], "strategy": "ddp"},
            "plugins=[SingleDevice] and strategy='ddp' each name a strategy; give only strategy",
        ),
        (
            {"tpu_cores": 8, "strategy": "ddp"},
            "tpu_cores=8 and strategy='ddp' each name a strategy; give only strategy",
        ),
        (
            {"replace_sampler_ddp": True, "use_distributed_sampler": False},
            "replace_sampler_ddp=True and use_distributed_sampler=False are two spellings of one "
            "option; give only use_distributed_sampler",
        ),
        (
            {"resume_from_checkpoint": "a", "resume": "b"},
            "resume_from_checkpoint='a' and resume='b' are two spellings of one option; give only "
            "resume",
        ),
        (
            {"logger": False, "loggers": ["csv"]},
            "logger=False and loggers=['csv'] are two spellings of one option; give only loggers",
        ),
    ],
)
def test_a_contradiction_is_refused_in_one_line(given: Any, line: str) -> None:
    assert refusal(**given) == [line]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"gpus": True}, "gpus=True: expected int | str | list[int] | None"),
        ({"gpus": False}, "gpus=False: expected int | str | list[int] | None"),
        ({"gpus": 1.5}, "gpus=1.5: expected int | str | list[int] | None"),
        ({"gpus": "auto"}, "gpus='auto': give a number, or indices"),
        ({"tpu_cores": 0}, "tpu_cores=0: give how many, or one of them as [1] to [8]"),
        ({"tpu_cores": True}, "tpu_cores=True: expected int | list[int] | None"),
        ({"tpu_cores": [0]}, "tpu_cores=[0]: give how many, or one of them as [1] to [8]"),
        ({"tpu_cores": [9]}, "tpu_cores=[9]: give how many, or one of them as [1] to [8]"),
        ({"tpu_cores": [1, 8]}, "tpu_cores=[1, 8]: give how many, or one of them as [1] to [8]"),
        ({"plugins": []}, "plugins=[]: give one, or strategy in its place"),
        ({"plugins": ["a", "b"]}, "plugins=['a', 'b']: give one, or strategy in its place"),
        ({"amp_backend": "amp"}, "amp_backend='amp': use 'native'; apex has no mixed precision"),
        ({"replace_sampler_ddp": 1}, "replace_sampler_ddp=1: expected bool | None"),
        (
            {"resume_from_checkpoint": 3},
            "resume_from_checkpoint=3: expected str | PathLike[str] | None",
        ),
    ],
)
def test_a_wrong_value_is_refused_and_named(given: Any, line: str) -> None:
    assert refusal(**given) == [line]


def test_everything_wrong_is_said_at_once() -> None:
    lines = refusal(gpus=8, devices=4, accelerator="ddp", strategy="fsdp", amp_backend="apex")
    assert [line.split("=")[0] for line in lines] == [
        "accelerator",
        "gpus",
        "amp_backend",
    ]
