"""Models whose ranks are over NCCL, as far as the trainer can see; named in test_nccl.py.

What NCCL does where a peer has gone is simulated: the process group cannot be destroyed, and a rank
that waits is aborted from a thread of NCCL's own.
"""

import atexit
import datetime
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from my_project.tasks import image_classifier as classifier


class OverNCCL(classifier.ImageClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
            dist.destroy_process_group = lambda group=None: time.sleep(10_000)
        if batch_idx == 2:
            self.fail()
        return super().training_step(batch, batch_idx)

    def fail(self) -> None:
        if self.global_rank == 1:
            atexit.register(Path("at exit").touch)
            raise ArithmeticError("planted on rank 1")


class Aborts(OverNCCL):
    """NCCL aborts rank 0 when its peer has gone."""

    def fail(self) -> None:
        if self.global_rank == 0:
            while not list(Path(os.environ["TRAINER_FAILURE_DIR"]).glob("rank-1.json")):
                time.sleep(0.01)
            os.abort()
        super().fail()


class AbortsBeside(OverNCCL):
    """Rank 1 is killed, and NCCL aborts rank 0 for that."""

    def fail(self) -> None:
        if self.global_rank == 1:
            Path("process").write_text(str(os.getpid()))
            time.sleep(10_000)
        while not Path("process").exists() or not Path("process").read_text():
            time.sleep(0.01)
        os.kill(int(Path("process").read_text()), 9)
        os.abort()


class Hangs(classifier.ImageClassifier):
    """One rank never comes to a collective, in which the other waits as over NCCL: in silence."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        if "RANK" in os.environ:  # not in the launcher
            pretend_nccl()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:  # NCCL itself does not raise an error in time
            self.group = dist.new_group(timeout=datetime.timedelta(seconds=10_000))
        if batch_idx == 2:
            if self.global_rank == self.rank:
                wait_for_ever()
            dist.all_reduce(torch.zeros(1), group=self.group)
        return super().training_step(batch, batch_idx)


def pretend_nccl() -> None:
    """Have the trainer take the process group, which gloo forms, for one of NCCL's."""
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"
    dist.destroy_process_group = lambda group=None: time.sleep(10_000)


def wait_for_ever() -> None:
    time.sleep(10_000)
