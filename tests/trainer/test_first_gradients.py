"""A loss that no parameter reaches is refused under each strategy, in one line on each rank."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.conformance.horovod_rows import horovodrun
from tests.project import run

LINE = (
    "the loss of training_step depends on no parameter of the optimizers: compute it from the "
    "module's own parameters"
)
TORCH = [
    *("ddp", "ddp-manual", "ddp_zero1", "fsdp", "fsdp-manual", "fsdp-unused"),
    "tensor_parallel",
]
FAIRSCALE = ["ddp_sharded", "ddp_sharded-manual"]
DEEPSPEED = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


def engine(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow, pytest.mark.needs(name)]


@pytest.mark.parametrize(
    ("names", "by"),
    [
        (TORCH, ()),
        pytest.param(FAIRSCALE, (), marks=engine("fairscale")),
        pytest.param(DEEPSPEED, (), marks=engine("deepspeed")),
        pytest.param(["horovod"], horovodrun(2), marks=engine("horovod")),
    ],
    ids=["torch", "fairscale", "deepspeed", "horovod"],
)
def test_a_loss_that_no_parameter_reaches_is_refused(
    tmp_path: Path, names: list[str], by: Sequence[str], request: pytest.FixtureRequest
) -> None:
    own = request.node.callspec.id
    named = own if own in ("fairscale", "deepspeed") else "torch"
    done = run(["-m", "unreached_subject", tmp_path, *names], by=by, engine=named)
    assert done.returncode == 0, done.stderr
    ends = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ends == [{name: [LINE] for name in names}] * 2


@pytest.mark.slow
def test_a_worker_that_waits_for_no_other_is_refused(tmp_path: Path) -> None:
    done = run(["-m", "unreached_subject", tmp_path, "parameter_server"])
    assert done.returncode == 2, done.stderr
    assert LINE in done.stderr
    assert "Traceback" not in done.stderr
