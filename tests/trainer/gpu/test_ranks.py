"""Several ranks on one GPU compute what one process computes on the CPU."""

import pytest
from my_project_trainer.checkpoint import reading
from tests.gpu import device
from tests.gpu.strategies import BOUNDS
from tests.gpu.subject import Sequences
from tests.gpu.training import STEPS, Trained, distance, losses, train
from tests.project import succeed

from .ranks_subject import ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(700)]
# NCCL cannot connect two ranks on one GPU; gloo can.
GLOO = {"TRAINER_BACKEND": "cpu:gloo,cuda:gloo"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return train(folder, "cpu", Sequences(), accelerator="cpu", strategy="single_device")


@pytest.mark.parametrize("name", ROWS)
def test_several_ranks_equal_one_process(tmp_path, reference, record_property, name):
    extra = GLOO if device.IS_GPU else {}
    succeed(["-m", "gpu.ranks_subject", name, tmp_path], extra=extra, fresh=True, timeout=600)
    saved = reading.resolve(tmp_path / "run")
    assert saved.name == f"step-{STEPS:08}"
    weights = reading.Checkpoint(saved).state()["model"]
    difference = distance(
        Trained(weights, losses(tmp_path / "run" / "metrics.csv"), tmp_path / "run"), reference
    )
    record_property("found", f"{difference:.1e} (bound {BOUNDS['32-true']:.0e})")
    assert difference <= BOUNDS["32-true"]
