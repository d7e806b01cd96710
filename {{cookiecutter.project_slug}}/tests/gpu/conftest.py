"""Settings of the checks that need a GPU."""

import pytest
import torch

from . import device


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip where there is no GPU, with the reason; in CI too, which need not have one."""
    reason = device.missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def exact():
    """Compute in float32 what is float32: a reference on the CPU knows no TF32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
