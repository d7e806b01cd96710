"""Strategies that average gradients of whole models, on models that are easily got wrong."""

import json

import pytest

from .project import run
from .test_fairscale import difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("subject", ["Odd", "Thawing"])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_zero1"])
def test_weights_are_those_of_one_process(tmp_path, strategy, subject):
    divided = {"strategy": strategy, "strategy_options": {"find_unused_parameters": True}}
    for name, options in ("alone", {"devices": 1}), ("run", {"devices": 2, **divided}):
        (tmp_path / name).mkdir()
        given = json.dumps({"max_epochs": 2, "global_batch_size": 4, **options})
        done = run(["-m", "tests.odd_subject", tmp_path / name, subject, given])
        assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-5
