"""Unusual parameters, optimizers and losses: trained as in one process, or refused in one line."""

import subprocess
from collections.abc import Callable
from functools import cache

import pytest
import torch
from tests.project import missing, require, run

from fitting import assert_close, saved

slow = pytest.mark.slow
exhaustive = [slow, pytest.mark.exhaustive]


def fit(folder, subject, strategy, devices=2) -> "subprocess.CompletedProcess[str]":
    engine = "deepspeed" if "deepspeed" in strategy else "torch"
    require(missing(engine))
    return run(["-m", "unusual_subject", folder, subject, strategy, str(devices)], engine=engine)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    @cache
    def weights(subject: str) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp(subject)
        done = fit(folder, subject, "single_device", 1)
        assert done.returncode == 0, done.stderr
        return saved(folder / "run")

    return weights


@pytest.mark.parametrize(
    ("subject", "strategy"),
    [
        ("Complex", "ddp"),
        ("Complex", "fsdp"),
        pytest.param("Complex", "hsdp", marks=exhaustive),
        # Its gradients were not averaged.
        pytest.param("ComplexManual", "ddp", marks=slow),
        pytest.param("ComplexManual", "fsdp", marks=slow),
        pytest.param("Strided", "fsdp", marks=slow),
        pytest.param("Strided", "hsdp", marks=exhaustive),
        *(pytest.param("Strided", f"deepspeed_stage_{stage}", marks=slow) for stage in (2, 3)),
        pytest.param("ScalarManual", "fsdp", marks=slow),
        *(
            pytest.param("Scalar", strategy, marks=slow)
            for strategy in ("fsdp", "deepspeed_stage_2", "deepspeed_stage_3")
        ),
        pytest.param("Empty", "fsdp", marks=slow),
        pytest.param("Empty", "hsdp", marks=exhaustive),
        pytest.param("Penalty", "deepspeed_stage_2", marks=slow),
    ],
)
def test_weights_are_those_of_one_process(tmp_path, alone, subject, strategy):
    done = fit(tmp_path, subject, strategy)
    assert done.returncode == 0, done.stderr
    assert_close(saved(tmp_path / "run"), alone(subject))


@pytest.mark.parametrize(
    ("subject", "strategy", "text"),
    [
        ("Mixed", "fsdp", "a unit of FSDP has parameters of torch.float32 and torch.float64; give"),
        *(
            pytest.param("Complex", f"deepspeed_stage_{stage}", "factor is complex", marks=slow)
            for stage in (1, 3)
        ),
        pytest.param("Empty", "deepspeed_stage_3", "weight is empty: stage 3 cannot", marks=slow),
        pytest.param("Mixed", "deepspeed_stage_2", "ZeRO needs parameters of one", marks=slow),
        pytest.param("RoutedRaw", "deepspeed_stage_3", "ranks use different", marks=slow),
    ],
)
def test_a_line_refuses_it(tmp_path, subject, strategy, text):
    done = fit(tmp_path, subject, strategy)
    # A script shows the traceback of what is refused before processes start.
    last = done.stderr.splitlines()[-1]
    assert text in last, done.stderr
    assert "strategy=" in last
    assert done.returncode == (2 if last.startswith("rank ") else 1)
    assert done.returncode == 1 or len(done.stderr.splitlines()) == 1, done.stderr
