"""Pipelines in meshes, each compared with one process: many of them in one start of the ranks.

``python -m stages_subject FOLDER four`` (or ``eight``) trains them, and ``… FOLDER alone`` what one
process computes in their stead, and from what they saved.
"""

import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.strategies.model_parallel.mesh.styles import ShardedRandomness
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import mesh_subject
import pipeline_subject
from mesh_subject import GPT
from pipeline_subject import ACCUMULATED, CLIPPED, CLIPPED_VALUES, Case

SHARDS = {"data": 1, "shard": 2, "pipeline": 2}
TENSOR = {"data": 1, "tensor": 2, "pipeline": 2}
EIGHT = {"data": 2, "tensor": 2, "pipeline": 2}
# A GPT in each; every one goes on from what the one before saved.
GPTS: dict[str, dict[str, dict[str, Any]]] = {
    "four": {
        "shards": SHARDS,
        "tensor": {**TENSOR, "microbatches": 3, "checkpoint": "always"},
    },
    "eight": {
        "replicas": EIGHT,
        "all": {**EIGHT, "data": 1, "shard": 2, "schedule": "zero_bubble"},
    },
}
RARE = {"kind": "rare"}
IN_MESH = {"strategy": "mesh"}
CASES = {
    "interleaved": Case(
        {**SHARDS, "schedule": "interleaved"}, RARE, IN_MESH | ACCUMULATED | CLIPPED, 4
    ),
    "zero bubble": Case({**SHARDS, "schedule": "zero_bubble"}, RARE, IN_MESH | CLIPPED_VALUES, 4),
    "averaged": Case({"data": 2, "pipeline": 2, "balance": [1, 5]}, RARE, IN_MESH | CLIPPED, 4),
    "bf16": Case(SHARDS, RARE, IN_MESH | {"precision": "bf16-mixed"}, 4, 3e-2),
}


class Draws(nn.Module):
    """Draws numbers, also in a part whose activations are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.layer = nn.Dropout(), nn.Linear(4, 4)
        self.drawn: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(64)
        self.drawn = {"outside": dropout(ones), "inside": self.inside(ones), "end": dropout(ones)}
        output: Tensor = self.layer(x)
        return output


class Drawing(trainer.TrainingModule):
    """Draws numbers before and in each stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequential_module = nn.Sequential(Draws(), Draws())
        self.before = torch.zeros(0)

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        whole = ColwiseParallel(output_layouts=Replicate())
        return {
            "sequential_module.*.inside": ShardedRandomness(),
            "sequential_module.*.layer": whole,
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before = torch.rand(8)
        return mse_loss(self.sequential_module(batch[0]), batch[0])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(32.0).view(8, 4)), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def draw(folder: Path) -> None:
    """Each rank writes what it has drawn in the last micro-batch of a step."""
    run = mesh_subject.make_trainer(
        folder, "draws", "mesh", 4, strategy_options=TENSOR, max_steps=1, gradient_clip_val=None
    )
    module = Drawing()
    run.fit(module)
    (drawn,) = [each.drawn for each in module.sequential_module if each.drawn]
    save_file({**drawn, "before": module.before}, folder / f"drawn-{run.global_rank}.safetensors")


def go_on(folder: Path, name: str, source: str, make: Any) -> None:
    """Go on from what another run has saved."""
    run = make(f"{source}-to-{name}", resume=str(folder / f"{source}-stopped"))
    run.fit(GPT())
    mesh_subject.write(folder, f"{source}-to-{name}", run, dict(run.metrics))


def together(folder: Path, which: str) -> None:
    """Train all pipelines of a number of processes."""
    before = None
    for name, sizes in GPTS[which].items():

        def make(run_name: str, sizes: Any = sizes, **more: Any) -> Any:
            devices = {"four": 4, "eight": 8}[which]
            return mesh_subject.make_trainer(
                folder, run_name, "mesh", devices, strategy_options=sizes, **more
            )

        mesh_subject.train(folder, name, make)
        if before is not None:
            go_on(folder, name, before, make)
        before = name
    if which == "four":
        draw(folder)
        options = {**SHARDS, "balance": [3, 3], "schedule": "zero_bubble"}
        pipeline_subject.seen(folder, "half", Case(options, {}, IN_MESH, 4))
        for name, case in CASES.items():
            pipeline_subject.train(folder, name, case)


def alone(folder: Path, which: str) -> None:
    """Train in one process, and go on there from what the pipelines saved."""

    def make(run_name: str, **more: Any) -> Any:
        return mesh_subject.make_trainer(folder, run_name, "single_device", 1, **more)

    mesh_subject.train(folder, "one", make)
    for name in GPTS[which]:
        go_on(folder, "one", name, make)
    if which == "four":
        own = {"strategy": "single_device", "strategy_options": {}, "devices": 1}
        for name, case in CASES.items():
            pipeline_subject.train(folder, f"{name} alone", case, **own)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "alone":
        alone(Path(sys.argv[1]), sys.argv[3])
    else:
        together(Path(sys.argv[1]), sys.argv[2])
