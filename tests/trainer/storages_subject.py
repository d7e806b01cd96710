"""Counts copies of weights under one strategy after another; started by ``test_storages.py``.

``python -m storages_subject FOLDER GROUP`` trains each case of a group on two ranks, and writes
``FOLDER/NAME.json``: rank 0's counts, in weights in float32.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from my_project_trainer.callbacks import EMA
from my_project_trainer.checkpoint import Checkpoints
from my_project_trainer.loop import saving
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet
from live_storages import Live, Pair

LAYERS, STEPS = 4, 5
_ASKS = ("get", "set", "add", "check", "compare_set", "wait")


class Deep(Descends, by=torch.optim.Adam, lr=0.01):
    """Layers one after another; ``repeated``: the last one is called twice."""

    def __init__(self, live: Live, asks: list[int], case: "Case") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(*(Pair(case.width) for _ in range(LAYERS)))
        self.live, self.asks, self.case = live, asks, case
        self.casts: list[float] = []
        self.asked: list[int] = []

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        layer = "sequential_module.*"
        return {f"{layer}.up": ColwiseParallel(), f"{layer}.down": RowwiseParallel()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.asked.append(self.asks[0])
        y = self.sequential_module(batch[0])
        if self.case.repeated:
            y = self.sequential_module[-1](y)
        loss: Tensor = y.float().square().mean()
        self.casts.append(2 * self.steady() / self.case.weight)
        return loss

    def steady(self) -> int:
        """Bytes of bfloat16 tensors, after gloo's threads have released their send buffers."""
        sizes = [sum(self.live.sizes(torch.bfloat16).values())]
        while len(sizes) < 4 or len({*sizes[-4:]}) > 1:
            time.sleep(0.005)
            sizes.append(sum(self.live.sizes(torch.bfloat16).values()))
        return sizes[-1]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4 * STEPS, self.case.width)), batch_size=2)


@dataclass(frozen=True)
class Case:
    """What is trained; ``repeated``: the last layer is called twice."""

    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    repeated: bool = False
    width: int = 128

    @property
    def weight(self) -> int:
        """Bytes of a weight."""
        return self.width * self.width * 4


UNITS = {"unit_parameters": 100}
WHOLE_LAYERS = {"unit_classes": ["Pair"]}
CASES = {
    "torch": {
        "ddp": Case(),
        "ddp, asynchronous save": Case(trainer={"async_checkpoints": True}),
        "ddp_zero1": Case(),
        "fsdp": Case(UNITS),
        "fsdp, asynchronous save": Case(UNITS, {"async_checkpoints": True}),
        "fsdp, EMA": Case(UNITS, {"callbacks": [EMA()]}),
        "fsdp, called twice": Case(WHOLE_LAYERS, repeated=True),
        "fsdp, checkpointed": Case(
            WHOLE_LAYERS, {"activation_checkpointing": ["sequential_module"]}
        ),
        "sequential": Case(),
    },
    "more": {
        "ddp, EMA": Case(trainer={"callbacks": [EMA()]}),
        "fsdp, checkpointed by unit": Case(WHOLE_LAYERS, {"activation_checkpointing": ["Pair"]}),
        "hsdp": Case({**UNITS, "shard_size": 2}),
        "tensor_parallel": Case(width=1024),  # each layer is a unit without an option
        "mesh, shards": Case({**UNITS, "data": 1, "shard": 2}),
        "sequential, gpipe": Case({"schedule": "gpipe"}),
        "sequential, EMA": Case(trainer={"callbacks": [EMA()]}),
    },
    "fairscale": {"ddp_sharded": Case()},
    "deepspeed": {f"deepspeed_stage_{stage}": Case() for stage in (1, 2, 3)},
}


@contextmanager
def counting(live: Live, asks: list[int], copies: list[int]) -> Iterator[None]:
    """Count the bytes that a save adds, and what the main thread asks of the store."""
    state, save = saving.state, Checkpoints.save

    def begin(*args: Any) -> Any:
        live.begin()
        return state(*args)

    def end(checkpoints: Checkpoints, *args: Any) -> None:
        save(checkpoints, *args)
        copies.append(live.end())

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            asks[0] += threading.current_thread() is threading.main_thread()
            return function(*args, **options)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(saving, "state", begin))
        stack.enter_context(mock.patch.object(Checkpoints, "save", end))
        for name in _ASKS:
            function = counted(getattr(dist.Store, name))
            stack.enter_context(mock.patch.object(dist.Store, name, function))
        yield


def fit(folder: Path, name: str, case: Case, devices: int) -> None:
    """Train, and write what was counted."""
    run = quiet(
        **{
            "devices": devices,
            "strategy": name.partition(",")[0],
            "strategy_options": dict(case.options) or None,
            "precision": "bf16-mixed",
            "max_steps": STEPS,
            "accumulate_grad_batches": 1,
            "checkpoint_every_n_steps": 1,
            "default_root_dir": folder / "runs",
            "run_name": name.replace(", ", "-").replace(" ", "-"),
            **case.trainer,
        }
    )
    # Activations and random states are smaller, shards of two ranks are not.
    live, asks, copies = Live(case.weight // 8), [0], list[int]()
    module = Deep(live, asks, case)
    with counting(live, asks, copies), live:
        run.fit(module)
    if run.global_rank == 0:
        asked = [after - before for before, after in pairwise(module.asked)]
        casts, largest = max(module.casts), max(copies) / case.weight
        record = {"casts": casts, "copies": largest, "asks": asked[-2:]}
        (folder / f"{name}.json").write_text(json.dumps(record))


def main(folder: Path, group: str, *names: str) -> None:
    for name in names or CASES[group]:
        fit(folder, name, CASES[group][name], devices=4 if group == "four" else 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
