"""Steps that record nothing never wait for the GPU: torch raises where one does."""

import pytest
from tests.gpu import device
from tests.gpu.strategies import options
from tests.gpu.subject import Sequences
from tests.gpu.training import train
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
STEPS = 8
# What each step does anyway is not looked at: the first makes the optimizer's state, the last is
# logged.
FIRST, LAST = 2, STEPS - 1


class Unwaiting(Sequences):
    """Has torch raise at every wait from the third step to the last but one."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        device.refuse_waiting(FIRST <= batch_idx < LAST)
        loss = super().training_step(batch, batch_idx)
        if self.waits and batch_idx == FIRST:
            self.seen = loss.item()
        return loss

    waits = False


class Waiting(Unwaiting):
    """Reads a number on the CPU in each step."""

    waits = True


@pytest.fixture(autouse=True)
def _waiting_again():
    yield
    device.refuse_waiting(False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_zero1", "fsdp", "hsdp"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_does_not_wait(tmp_path, strategy, precision, clip):
    train(
        *(tmp_path, "run", Unwaiting(optimizer="fused")),
        **options(strategy),
        precision=precision,
        gradient_clip_val=clip,
        max_steps=STEPS,
        log_every_n_steps=1000,
    )
    device.only_a_gpu_shows("what waits")


def test_a_step_with_scaled_gradients_does_not_wait(tmp_path):
    """Only a fused optimizer can leave out a step by itself; for others the scaler must wait."""
    arguments = (tmp_path, "run", Unwaiting(optimizer="fused"))
    train(*arguments, precision="16-mixed", max_steps=STEPS, log_every_n_steps=1000)
    device.only_a_gpu_shows("what waits")


def test_a_step_that_waits_is_noticed(tmp_path):
    def fit() -> None:
        train(tmp_path, "run", Waiting(), max_steps=STEPS, log_every_n_steps=1000)

    if not device.IS_GPU:
        fit()
    device.only_a_gpu_shows("what waits")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        fit()
