"""Fails on the GPU in one way; started by test_failures.py.

``python -m gpu.failing_subject KIND FOLDER``; ``struck`` in the folder says when it failed:

``raises``      the only rank raises, with a kernel queued that takes half a minute
``one_of_two``  of two ranks on one GPU the second raises; the first waits for it in backward
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from my_project_trainer.launch import collectives
from my_project_trainer.run import placement
from tests.gpu import device
from tests.gpu.subject import Sequences
from torch import Tensor

from fitting import fit

STEP = 2
LONG = 600.0


class Fails(Sequences):
    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        self.kind, self.folder = kind, folder

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == STEP and self.global_rank == self.trainer.world_size - 1:
            device.synchronize()
            (self.folder / "struck").write_text(str(time.time()))
            if self.kind != "one_of_two":
                device.keep_busy(30)
            raise ArithmeticError("planted")
        return super().training_step(batch, batch_idx)


def share_the_gpu(ranks: int = 2) -> None:
    """Let several ranks use the one GPU, which the trainer refuses."""
    if device.IS_GPU:
        torch.cuda.device_count = lambda: ranks
        placement.Placement.torch_devices = property(lambda _: (device.DEVICE,) * ranks)


def act_as_one_of_several() -> None:
    """Have the only rank fail as one that has peers, which NCCL does not allow on one GPU."""
    if device.IS_GPU:
        collectives.teardown_may_hang = dist.is_initialized


def main(kind: str, folder: Path) -> None:
    ranks = 2 if kind == "one_of_two" else 1
    if ranks > 1:
        share_the_gpu()
    else:
        act_as_one_of_several()
    options = {"devices": ranks, "strategy": "ddp", "strategy_options": {"timeout_seconds": LONG}}
    fit(Fails(kind, folder), folder, accelerator=device.ACCELERATOR, max_steps=5, **options)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
