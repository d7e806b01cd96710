"""Ranks on emulated GPUs: what only CUDA does across them; started by test_emulated_ranks.py.

``python -m emulated_ranks FOLDER`` starts four ranks, which write what each has drawn as
``FOLDER/RANK.json``.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from my_project_trainer.checkpoint import dtensors
from my_project_trainer.launch.rendezvous import stay_on_loopback
from my_project_trainer.run import placement
from my_project_trainer.strategies import process_group
from my_project_trainer.strategies.model_parallel.mesh.strategy import Mesh
from my_project_trainer.strategies.model_parallel.mesh.styles import ShardedRandomness
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, _random
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import emulated_gpu
from emulated_counts import counting
from emulated_gpu import NAME
from fitting import Descends, quiet

RANKS, STEPS, SAVED = 4, 4, 2
REPLICAS = {"data": 2, "tensor": 2, "timeout_seconds": 600.0}


class Drawing(nn.Module):
    """Draws dropout masks of DTensors, and of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 64), nn.Linear(64, 4), nn.Dropout()
        self.inside = nn.Dropout()
        self.drawn: list[dict[str, list[bool]]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = self.up(x).cosh()
        dropped = self.dropout(hidden)
        ones = torch.ones(64, device=x.device)
        same = DTensor.from_local(ones, hidden.device_mesh, [Replicate()])
        masks = {
            "sharded": dropped.to_local(),
            "replicated": dropout(same).to_local(),
            "inside": self.inside(ones),
            "plain": dropout(ones),
        }
        self.drawn.append({key: (mask != 0).flatten().tolist() for key, mask in masks.items()})
        output: Tensor = self.down(dropped)
        return output


class Model(Descends, by=torch.optim.AdamW, lr=0.01, fused=True):
    """Draws in its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(Drawing(), nn.Linear(4, 4))

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        return {
            "sequential_module.0.up": ColwiseParallel(use_local_output=False),
            "sequential_module.0.down": RowwiseParallel(),
            "sequential_module.0.inside": ShardedRandomness(),
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.sequential_module(batch[0]), batch[0])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=2)


def fit(folder: Path, **options: Any) -> tuple[Any, Model]:
    """A trainer that has trained in a mesh, and the module of this rank."""
    run = quiet(
        accelerator="gpu",
        devices=RANKS,
        strategy="mesh",
        strategy_options=REPLICAS,
        global_batch_size=4,
        max_steps=STEPS,
        gradient_clip_val=0.1,
        checkpoint_every_n_steps=SAVED,
        keep_checkpoints=3,
        default_root_dir=folder,
        **options,
    )
    torch.manual_seed(0)
    module = Model()
    run.fit(module)
    return run, module


def drawn(module: Model) -> list[dict[str, list[bool]]]:
    masks: list[dict[str, list[bool]]] = module.sequential_module[0].drawn
    return masks


def weights(module: Model) -> list[Tensor]:
    return [dtensors.local(parameter.detach()).cpu() for parameter in module.parameters()]


def mesh(folder: Path) -> None:
    """Write what this rank has drawn."""
    record: dict[str, Any] = {"broadcasts": 0}
    broadcast = dist.broadcast

    def count(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        record["broadcasts"] += tensor.dtype == torch.uint8  # the state of a generator
        return broadcast(tensor, *arguments, **named)

    with mock.patch.object(dist, "broadcast", count), counting() as counts:
        run, module = fit(folder, run_name="replicas")
        saved = run.run_directory / "checkpoints" / f"step-{SAVED:08d}"
        _, resumed = fit(folder, resume=str(saved))
    record["replicas"], record["resumed"] = drawn(module), drawn(resumed)
    pairs = zip(weights(module), weights(resumed), strict=True)
    record["equal"] = all(one.equal(other) for one, other in pairs)
    record["operators"] = sorted(counts.operators)
    record["left"] = str(_random._rng_tracker)
    (folder / f"{run.global_rank}.json").write_text(json.dumps(record))


def main(folder: Path) -> None:
    stay_on_loopback()
    emulated_gpu.install()
    emulated_gpu.draw_by_offset()
    Mesh.limits = replace(Mesh.limits, accelerators=("cpu", "cuda", NAME))
    with (
        mock.patch.object(placement, "choose_accelerator", return_value=NAME),
        mock.patch.object(process_group, "backends", return_value=f"cpu:gloo,{NAME}:gloo"),
        # Each rank sees one GPU, its own, as srun's --gpus-per-task=1 has it.
        mock.patch.object(placement, "parse_devices", lambda value, available: [*range(value)]),
    ):
        mesh(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
