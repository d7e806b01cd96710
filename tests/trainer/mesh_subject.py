"""Trains a small GPT in a mesh, and under others from what it saved; started by ``test_mesh.py``.

``python -m mesh_subject FOLDER NAME DEVICES STRATEGY OPTIONS [SOURCE …]`` trains to the end, from
the beginning and from the run of each source, and writes weights and values as FOLDER/NAME*.
``python -m mesh_subject draw FOLDER DEVICES STRATEGY`` writes random numbers.
``python -m mesh_subject order FOLDER OPTIONS`` writes operations of a step of two replicas.
"""

import json
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.checkpoint import reading
from my_project_trainer.strategies.model_parallel.mesh.styles import ShardedRandomness
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from fitting import Descends, quiet
from my_project.tasks.language_model import LanguageModel

CONTEXT, SAMPLES, BATCH, STEPS, STOP = 8, 22, 8, 5, 2


class GPT(LanguageModel):
    """Two layers; the last batch of an epoch is smaller."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        small = {"layers": 2, "heads": 4, "width": 16, "context": CONTEXT, "warmup_steps": 1}
        super().__init__(**{**small, **options})

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)
        return DataLoader(list(tokens), batch_size=BATCH)

    val_dataloader = predict_dataloader = train_dataloader

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("count", len(batch), reduce_fx="sum")


class Drawing(Descends):
    """Draws numbers outside and inside of a sharded module, and inside of one computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)
        self.inside = nn.Dropout()
        self.seen = SumMetric()
        self.drawn: dict[str, Tensor] = {}

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        columns = ColwiseParallel(input_layouts=self.input_layout)
        return {"inside": ShardedRandomness(), "up": columns, "down": RowwiseParallel()}

    input_layout: Any = Replicate()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        ones = torch.ones(64, requires_grad=True)
        drawn = {"outside": dropout(ones), "inside": self.inside(ones), "after": dropout(ones)}
        again = checkpoint(self.inside, ones, use_reentrant=False)
        (computed_again,) = torch.autograd.grad(again.sum(), ones)
        drawn |= {"again": again, "computed again": computed_again, "end": torch.rand(4)}
        self.drawn |= {f"{batch_idx} {name}": tensor.detach() for name, tensor in drawn.items()}
        return self.down(self.up(self.norm(self.first(batch))).tanh()).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.update(float(len(batch)))
        self.log("seen", self.seen)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(4.0 * SAMPLES).view(SAMPLES, 4), batch_size=4)

    val_dataloader = train_dataloader


class Undeclared(Drawing):
    """Its first layers see a part of the batch on each rank, and its plan does not say so."""

    input_layout = Shard(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.norm(self.first(batch.chunk(2)[self.global_rank]))
        return self.down(self.up(hidden).tanh()).square().mean()


class Uneven(GPT):
    """Its sequences are one byte too short for the plan."""

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(BATCH, CONTEXT, dtype=torch.int64), batch_size=BATCH)


def draw(folder: Path, devices: int, strategy: str) -> None:
    """Write what each rank draws and counts, and how plans that do not fit the data end."""
    run = make_trainer(folder, "draws", strategy, devices, gradient_clip_val=None, max_steps=2)
    module = Drawing()
    run.fit(module)
    save_file(module.drawn, folder / f"drawn-{run.global_rank}.safetensors")
    values = {"seen": run.metrics["seen"]}
    for name, wrong in (("undeclared", Undeclared()), ("uneven", Uneven())):
        try:
            make_trainer(folder, name, strategy, devices).fit(wrong)
        except trainer.UserError as error:
            values[name] = str(error)
    (folder / f"drawn-{run.global_rank}.json").write_text(json.dumps(values))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::mm", "c10d::allreduce_"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Ordered(GPT):
    """Notes the operations between the end of a forward and the optimizer's step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.operations = Operations()
        self.operations.__enter__()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.operations.__exit__(None, None, None)


def order(folder: Path, options: str) -> None:
    """Write the operations of the last backward."""
    arguments = {"strategy_options": json.loads(options), "gradient_clip_val": None, "max_steps": 2}
    run, module = make_trainer(folder, "order", "mesh", 2, **arguments), Ordered()
    run.fit(module)
    (folder / f"order-{run.global_rank}.json").write_text(json.dumps(module.operations.names))


def make_trainer(folder: Path, name: str, strategy: str, devices: int, **options: Any) -> Any:
    """A trainer whose global batch does not depend on the number of replicas."""
    shared = {"global_batch_size": BATCH, "max_steps": STEPS, "gradient_clip_val": 0.05}
    shared |= {"log_every_n_steps": 1, "checkpoint_every_n_steps": 1, "default_root_dir": folder}
    return quiet(**shared | {"run_name": name, "strategy": strategy, "devices": devices} | options)


def write(folder: Path, name: str, run: Any, values: dict[str, Any]) -> None:
    """The main process writes the newest checkpoint's weights and states, and values."""
    if run.global_rank:
        return
    state = reading.Checkpoint(reading.resolve(run.run_directory)).state()
    (optimizer,) = state["optimizers"]
    states = {
        f"{parameter}/{key}": value
        for parameter, slots in optimizer["state"].items()
        for key, value in slots.items()
    }
    tensors = {key: leaf.contiguous().clone() for key, leaf in {**state["model"], **states}.items()}
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(values))


def train(folder: Path, name: str, make: Any, **model: Any) -> None:
    """Train to the end; stop after some steps, and resume."""
    run = make(name)
    run.fit(GPT(**model))
    values: dict[str, Any] = dict(run.metrics)
    predicted = make(f"{name}-predicts").predict(GPT(**model), checkpoint=str(run.run_directory))
    values["predicted"] = torch.cat(predicted).tolist()
    write(folder, name, run, values)
    stopped = make(f"{name}-stopped", max_steps=STOP)
    stopped.fit(GPT(**model))
    resumed = make(f"{name}-resumed", resume=str(stopped.run_directory))
    resumed.fit(GPT(**model))
    write(folder, f"{name}-resumed", resumed, dict(resumed.metrics))


def main(folder: str, name: str, devices: str, strategy: str, options: str, *sources: str) -> None:
    root, arguments = Path(folder), json.loads(options)
    model = arguments.pop("model", {})

    def make(run_name: str, **more: Any) -> Any:
        return make_trainer(root, run_name, strategy, int(devices), **arguments, **more)

    train(root, name, make, **model)
    for source in sources:
        run = make(f"{source}-to-{name}", resume=str(root / f"{source}-stopped"))
        run.fit(GPT(**model))
        write(root, f"{source}-to-{name}", run, dict(run.metrics))


if __name__ == "__main__":
    if sys.argv[1] == "order":
        order(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "draw":
        draw(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(*sys.argv[1:])
