"""What only DeepSpeed's tests train; started by them.

``python -m deepspeed_subject FOLDER PROCESSES MORE WAY …`` writes a file a way. PROCESSES 0
is one process without DeepSpeed, for comparison. MORE are further arguments of the trainer, in
JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from tests.conformance import subject
from tests.conformance.subject import Base, Regression, Validated
from tests.conformance.worker import STOP, train
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from fitting import Descends

WARMUP = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 5}
ONE_BIT = {"lr": 0.02, "freeze_step": 4, "betas": [0.8, 0.9], "eps": 1e-4, "cuda_aware": True}


def warmed_up(step: int) -> float:
    """Learning rate of a step, counted from 0: linear over the warm-up, after DeepSpeed's own."""
    low, high = WARMUP["warmup_min_lr"], WARMUP["warmup_max_lr"]
    return low + (high - low) * min(max(step - 1, 0) / WARMUP["warmup_num_steps"], 1.0)


class Sometimes(Descends, Base):
    """Leaves one of its layers out in every second batch; knows no momentum."""

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(6, 16)
        self.last = nn.Linear(16, 3)
        self.start()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.first(x)
        if batch_idx % 2 == 0:
            hidden = hidden + self.second(x)
        loss = mse_loss(self.last(hidden.tanh()), y)
        self.log("loss", loss)
        return loss


class Grouped(Validated):
    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.sequential_module[3].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.sequential_module[:3].parameters(), "lr": 0.02},
            {"params": self.sequential_module[3:].parameters(), "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


class Rated(Regression):
    """Steps by what the configuration of its DeepSpeed says; alone, by the same in the code."""

    def __init__(self, adam: bool = False, **base: Any) -> None:
        super().__init__(**base)
        self.adam = adam

    def configure_optimizers(self) -> Any:
        if self.adam:
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=1.0, weight_decay=0.1)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = {"scheduler": LambdaLR(optimizer, warmed_up), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Plain(Descends, Regression, lr=1.0):
    """SGD, without a scheduler and momentum."""


class Overflowing(Descends, Regression, lr=1e-3):
    """Its first scaled gradients do not fit into float16."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 300


subject.KINDS.update(
    sometimes=Sometimes, grouped=Grouped, rated=Rated, plain=Plain, overflowing=Overflowing
)


def configured(**config: Any) -> dict[str, Any]:
    return {"strategy": "deepspeed", "strategy_options": {"config": config}}


WARMUP_LR = {"type": "WarmupLR", "params": {**WARMUP, "warmup_type": "linear"}}
# torch's, since DeepSpeed's own is compiled.
ADAM_W = {"type": "AdamW", "params": {"lr": 1.0, "weight_decay": 0.1, "torch_adam": True}}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
ACCUMULATING = {"accumulate_grad_batches": 2}


ONE_BIT_ADAM = {"type": "OneBitAdam", "params": ONE_BIT}


# Arguments of the subject and of the trainer.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "warm-up": ({"kind": "plain"}, configured(zero_optimization={"stage": 2}, scheduler=WARMUP_LR)),
    "own optimizer": (
        {"kind": "rated", "adam": True},
        configured(zero_optimization=OFFLOADED, optimizer=ADAM_W, scheduler=WARMUP_LR),
    ),
    "steep": ({"scale": 2.0}, {"strategy": "deepspeed_stage_2"}),
    "one-bit": ({}, configured(optimizer=ONE_BIT_ADAM)),
    "one-bit mixed": (
        {"scale": 0.1},
        {**configured(optimizer=ONE_BIT_ADAM, fp16={"enabled": True}), "precision": "16-mixed"},
    ),
    # A second copy of the weights, sharded in each node.
    "second copy": (
        {"optimizer": "adam"},
        configured(zero_optimization={"stage": 3, "zero_hpz_partition_size": 2}),
    ),
    "overflow": (
        {"kind": "overflowing", "scale": 0.1},
        {"strategy": "deepspeed_stage_3", "precision": "16-mixed"},
    ),
}
SHARDED = [f"deepspeed_stage_{stage}" for stage in ("2", "3", "2_offload", "3_offload")]
WAYS |= {f"sometimes {name}": ({"kind": "sometimes"}, {"strategy": name}) for name in SHARDED}
WAYS |= {
    f"{way} accumulating": (subject, {**options, **ACCUMULATING})
    for way, (subject, options) in WAYS.items()
    if way.startswith("sometimes")
}
PLAIN = ("ddp", "deepspeed_stage_2", "deepspeed_stage_3")
WAYS |= {f"grouped {name}": ({"kind": "grouped"}, {"strategy": name}) for name in PLAIN}
# Arguments of the subject where one process trains it, if others.
ALONE = {"warm-up": {"kind": "rated"}}
RESUMED = (*("warm-up", "own optimizer", "one-bit", "one-bit mixed"), *("overflow", "second copy"))
GROUPED = "grouped deepspeed_stage_3"


def main(folder: Path, processes: int, more: dict[str, Any], ways: list[str]) -> None:
    """Train in some ways; those of RESUMED also with a stop and a resume."""
    for way in ways:
        kwargs, options = WAYS[way]
        if processes == 0:
            kwargs = ALONE.get(way, kwargs)
            options = {key: option for key, option in options.items() if "strategy" not in key}
        name = way.replace(" ", "-")
        options = {**options, "devices": max(processes, 1), "run_name": name, **more}
        run = train(folder / f"{way}.safetensors", kwargs, options)
        if processes and way in RESUMED:
            options["run_name"] += "-interrupted"
            stop = {"max_steps": 2 * STOP, "checkpoint_every_n_steps": 1}
            stopped = train(folder / f"{way}-stopped.safetensors", kwargs, options | stop)
            train(folder / f"{way}-resumed.safetensors", kwargs, options | {"resume": str(stopped)})
        if processes and way == GROUPED and not more:
            validate(folder, kwargs, options, run)


def validate(folder: Path, arguments: Any, options: dict[str, Any], run: Path) -> None:
    """Write what a run's weights reach, in a module that has not been trained."""
    options = {**options, "accelerator": "cpu", "enable_progress_bar": False}
    again = trainer.Trainer(**options)
    metrics = again.validate(subject.make(**arguments), checkpoint=str(run))
    if again.global_rank == 0:
        (folder / "validated.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    os.environ["CXX"] = "no-compiler"
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])
