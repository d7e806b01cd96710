"""Models that are easily got wrong, under the strategies that torch and DeepSpeed divide.

FairScale's and Horovod's are tried with the rest of theirs.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_fairscale import difference
from tests.project import missing, require, run

pytestmark = pytest.mark.slow

UNUSED = {"strategy_options": {"find_unused_parameters": True}}
HYBRID = {"strategy_options": {"shard_size": 2}, "devices": 4}


def fit(folder: Path, subject: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Fit a subject of two epochs in a new folder, with gradients that are clipped."""
    engine = "deepspeed" if options.get("strategy", "").startswith("deepspeed") else "torch"
    require(missing(engine))
    folder.mkdir()
    trainer_options = {"max_epochs": 2, "global_batch_size": 4, "gradient_clip_val": 0.3, **options}
    return run(["-m", "odd_subject", folder, subject, json.dumps(trainer_options)], engine=engine)


@pytest.mark.parametrize(
    ("strategy", "subject", "options"),
    [
        ("ddp", "Odd", UNUSED),
        ("ddp_zero1", "Thawing", UNUSED),
        ("fsdp", "Freezing", {}),
        ("deepspeed_stage_3", "OddAtOnce", {}),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                *(("ddp", subject, UNUSED) for subject in ("Thawing", "Freezing")),
                ("ddp_zero1", "Odd", UNUSED),
                ("fsdp", "Thawing", {}),
                ("hsdp", "Thawing", HYBRID),
                *((f"deepspeed_stage_{stage}", "OddAtOnce", {}) for stage in (1, 2)),
            )
        ),
    ],
)
def test_weights_are_those_of_one_process(tmp_path, strategy, subject, options):
    for name, more in ("alone", {}), ("run", {"strategy": strategy, "devices": 2} | options):
        done = fit(tmp_path / name, subject, **more)
        assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-5


def test_half_precision_beside_a_parameter_without_dimensions(tmp_path):
    for name, more in ("alone", {}), ("run", {"strategy": "fsdp", "devices": 2}):
        done = fit(tmp_path / name, "Odd", precision="16-mixed", **more)
        assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-3
