"""Trains with several ranks on one GPU; started by test_ranks.py: ``ranks_subject ROW FOLDER``.

NCCL does not connect two ranks on one GPU. gloo does, by ``cuda:gloo``, but sends no tensor of a
GPU from one rank to another: it passes through the host here.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
import torch.distributed as dist
from tests.gpu import device
from tests.gpu.subject import BATCH, Sequences
from tests.gpu.training import STEPS
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from .failing_subject import share_the_gpu


@dataclass(frozen=True)
class Row:
    strategy: str
    ranks: int = 2
    options: tuple[tuple[str, Any], ...] = ()


_UNITS = ("unit_parameters", 1000)
ROWS = {
    "ddp": Row("ddp"),
    "ddp_zero1": Row("ddp_zero1"),
    "fsdp": Row("fsdp", options=(_UNITS,)),
    "mesh, replicas": Row("mesh", 4, (_UNITS, ("data", 2), ("shard", 2))),
    "sequential": Row("sequential"),
    "tensor_parallel": Row("tensor_parallel"),
    "mesh, tensor": Row("mesh", 4, (_UNITS, ("data", 1), ("shard", 2), ("tensor", 2))),
    "mesh, pipeline": Row("mesh", 4, (("data", 1), ("shard", 2), ("pipeline", 2))),
}


class Sharded(Sequences):
    """Sequences whose networks can be divided over a tensor group."""

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        return {
            "sequential_module.*.up": ColwiseParallel(),
            "sequential_module.*.down": RowwiseParallel(),
        }


class _Received:
    def __init__(self, work: dist.Work, arrived: Tensor, to: Tensor) -> None:
        self._work, self._arrived, self._to = work, arrived, to

    def wait(self, *_: Any) -> bool:
        self._work.wait()
        self._to.detach().copy_(self._arrived)  # a leaf that requires grad
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _Sent:
    def __init__(self, work: dist.Work, sent: Tensor) -> None:
        self._work, self._sent = work, sent

    def wait(self, *_: Any) -> bool:
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


def send_through_the_host() -> None:
    """Replace the functions of torch by which ranks send tensors to one another."""
    send, receive = dist.isend, dist.irecv

    def isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent = tensor.detach().cpu()
        return _Sent(send(sent, *args, **options), sent)

    def irecv(tensor: Tensor, *args: Any, **options: Any) -> Any:
        arrived = torch.empty_like(tensor, device="cpu")
        return _Received(receive(arrived, *args, **options), arrived, tensor)

    for module in (dist, dist.distributed_c10d):
        module.isend, module.irecv = isend, irecv
        module.send = lambda *args, **options: isend(*args, **options).wait()
        module.recv = lambda *args, **options: irecv(*args, **options).wait()


def main(name: str, folder: Path) -> None:
    row = ROWS[name]
    share_the_gpu(row.ranks)
    send_through_the_host()
    trainer.Trainer(
        accelerator=device.ACCELERATOR,
        devices=row.ranks,
        strategy=row.strategy,
        strategy_options=dict(row.options),
        global_batch_size=BATCH,
        max_steps=STEPS,
        matmul_precision="highest",
        log_every_n_steps=1,
        loggers=["csv"],
        enable_progress_bar=False,
        default_root_dir=folder,
        run_name="run",
    ).fit(Sharded())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
