"""Trains under one strategy after another, and records what ranks exchange.

``python -m order_subject FOLDER LAUNCH [NAME …]`` writes ``FOLDER/NAME/rank-N.jsonl`` for each case
of a launch. Each saves while it trains, evaluates in between, accumulates and clips.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from my_project_trainer.strategies.replicated import ddp
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from collectives_record import recorded
from fitting import Descends, quiet

SAMPLES, WIDTH, BLOCKS = 37, 8, 4
all_reduce = dist.all_reduce


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(Descends, by=torch.optim.Adam, lr=0.01):
    """Blocks one after another; ``situation``: see the functions below."""

    def __init__(self, situation: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.situation, self.may_skip_batches = situation, situation == "skipped"
        self.sequential_module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.other = Block() if situation == "unused" else nn.Identity()
        self.norm = nn.BatchNorm1d(WIDTH) if situation == "normalized" else nn.Identity()

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        block = "sequential_module.*"
        return {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.sequential_module(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        (x,) = batch
        y = self(x)
        if self.may_skip_batches and batch_idx == 1 and self.global_rank == 1:
            return None
        if self.situation == "unused" and (batch_idx + self.global_rank) % 2:
            y = self.other(y)
        loss = mse_loss(y, x.roll(1, dims=1))
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def train_dataloader(self) -> Any:
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        if self.situation == "uneven":
            return [[word] for word in x.split(4)[: 6 - 2 * self.global_rank]]
        return DataLoader(TensorDataset(x), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(7, WIDTH)), batch_size=2)


class Reordered(ddp.DDP):
    """Exchanges over two groups after each backward: rank 1 in the other order, as gloo allows."""

    def connect(self, *args: Any) -> None:
        super().connect(*args)
        self.groups = [dist.new_group([0, 1]) for _ in range(2)]

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        groups = self.groups[::-1] if self.layout.rank == 1 else self.groups
        for work in [dist.all_reduce(loss.detach(), group=g, async_op=True) for g in groups]:
            work.wait()

    def teardown(self) -> None:
        self.groups = []
        super().teardown()


@dataclass(frozen=True)
class Case:
    """What is trained; ``strategy``: a name, if it is not that of the case before its first comma.

    ``is_chained``: whether operations start others when they end. With NCCL, they do at once; with
    gloo, at any time in a thread of its own, unless each is waited for.
    """

    strategy: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    situation: str = ""
    is_chained: bool = False


UNITS = {"unit_parameters": 100}
UNEVEN = {"uneven_inputs": "join", "global_batch_size": None}
UNUSED = {"find_unused_parameters": True}
SCHEDULES = ("gpipe", "1f1b")


def skipped(**options: Any) -> Case:
    """Rank 1 skips a batch."""
    return Case(options=options, situation="skipped")


def skipped_alone(**options: Any) -> Case:
    """Rank 1 skips a batch, which is a whole step."""
    return Case(options=options, trainer={"accumulate_grad_batches": 1}, situation="skipped")


def uneven(**options: Any) -> Case:
    """Rank 1 has fewer batches."""
    return Case(options=options, trainer=UNEVEN, situation="uneven")


def unused(**options: Any) -> Case:
    """Ranks use a block in different steps."""
    return Case(options=options | UNUSED, situation="unused")


TWO = {
    "ddp": Case(),
    "ddp, skipped": skipped(),
    "ddp, uneven": uneven(),
    "ddp, unused": unused(),
    "ddp, normalized": Case(trainer={"sync_batchnorm": True}, situation="normalized"),
    "ddp_zero1": Case(),
    "fsdp": Case(options=UNITS),
    "fsdp, unused": unused(),
    "hsdp": Case(options={**UNITS, "shard_size": 1}),
    "tensor_parallel": Case(),
    "sequential": Case(),
    "ddp, fp16 hook": Case(options={"communication_hook": "fp16"}),
}
MORE_ON_TWO = {
    "ddp, bf16 hook": Case(options={"communication_hook": "bf16"}),
    "ddp, PowerSGD": Case(
        options={"communication_hook": "powersgd", "powersgd_start_step": 2}, is_chained=True
    ),
    "ddp_zero1, skipped": skipped(),
    "ddp_zero1, uneven": uneven(),
    "ddp_zero1, unused": unused(),
    "fsdp, skipped": skipped(**UNITS),
    "fsdp, uneven": uneven(**UNITS),
    "fsdp, offload": Case(options={**UNITS, "offload": True}),
    "fsdp, whole gradients": Case(options={**UNITS, "reduce_every_microbatch": False}),
    "fsdp, bf16": Case(options=UNITS, trainer={"precision": "bf16-mixed"}),
    "fsdp, fp16": Case(options=UNITS, trainer={"precision": "16-mixed"}),
    **{f"sequential, {schedule}": Case(options={"schedule": schedule}) for schedule in SCHEDULES},
}
FOUR = {
    "hsdp": Case(options={**UNITS, "shard_size": 2}),
    "hsdp, unused": unused(shard_size=2),
    "hsdp, skipped": skipped(**UNITS, shard_size=2),
    "ddp_zero1": Case(),
    "fsdp": Case(options=UNITS),
    "mesh, replicas": Case(options={"tensor": 2}),
    "mesh, replicas in units": Case(options={**UNITS, "tensor": 2}),
    "mesh, shards": Case(options={**UNITS, "data": 1, "shard": 2, "tensor": 2}),
    "mesh, skipped": skipped(tensor=2),
    "sequential, two pipelines": Case(options={"stages": 2}),
    **{f"sequential, {name}": Case(options={"schedule": name}) for name in ("gpipe", "1f1b")},
}
FAIRSCALE = {
    "ddp_sharded": Case(),
    "ddp_sharded, skipped": skipped_alone(),
    "ddp_sharded, uneven": uneven(),
}
DEEPSPEED = {
    "deepspeed, stage 0": Case(options={"stage": 0}),
    **{f"deepspeed_stage_{stage}": Case() for stage in (1, 2, 3)},
    **{f"deepspeed_stage_{stage}_offload": Case() for stage in (2, 3)},
    **{f"deepspeed_stage_{stage}, skipped": skipped_alone() for stage in (2, 3)},
    "deepspeed_stage_2, uneven": uneven(),
}
PLANTED = {"reordered": Case(Reordered())}
LAUNCHES: dict[str, tuple[int, Mapping[str, Case]]] = {
    "two": (2, {**TWO, **PLANTED}),
    "more on two": (2, MORE_ON_TWO),
    "nodes": (2, {"ddp2": Case()}),
    "four": (4, FOUR),
    "fairscale": (2, FAIRSCALE),
    "deepspeed": (2, DEEPSPEED),
}
"""Number of devices (of a node), and the cases."""


def ended(*args: Any, **options: Any) -> Any:
    """All-reduce, and wait for the end."""
    work = all_reduce(*args, **options)
    if work is not None:
        work.get_future().wait()
    return work


def fit(folder: Path, name: str, case: Case, devices: int) -> None:
    """Train an epoch, and write what this rank exchanges."""
    strategy = case.strategy or name.partition(",")[0]
    records = folder / name
    records.mkdir(parents=True, exist_ok=True)
    run = quiet(
        **{
            "devices": devices,
            "strategy": strategy,
            "strategy_options": dict(case.options) or None,
            "max_epochs": 1,
            "global_batch_size": 16,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1.0,
            "checkpoint_every_n_steps": 1,
            "async_checkpoints": True,
            "val_every_n_steps": 1,
            "log_every_n_steps": 1,
            "default_root_dir": folder / "runs",
            "run_name": name.replace(", ", "-").replace(" ", "-"),
            **case.trainer,
        }
    )
    module = Net(case.situation)
    with (
        recorded(records / f"rank-{os.environ.get('RANK', '0')}.jsonl"),
        mock.patch.object(dist, "all_reduce", ended if case.is_chained else all_reduce),
    ):
        run.fit(module)


def main(folder: Path, launch: str, *names: str) -> None:
    devices, cases = LAUNCHES[launch]
    for name in names or cases:
        fit(folder, name, cases[name], devices)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
