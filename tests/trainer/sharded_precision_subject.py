"""Whole weights that are alive between a forward and its backward, under autocast.

``python -m sharded_precision_subject FOLDER STRATEGY PRECISION [OPTIONS]`` trains three steps
on two ranks and prints, as JSON, how many were counted on rank 0 in each step, and the loss.
"""

import json
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

LAYERS, WIDTH, BATCH = 8, 320, 6


class Alive(TorchDispatchMode):
    """Notes the storages of all tensors of a weight's size that are made inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.untyped_storage().nbytes() == size(each.dtype):
                storage = each.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), each.dtype
        return outputs

    def count(self) -> int:
        """How many of them hold memory still."""
        return sum(self._holds(*each) for each in self._storages.values())

    def _holds(self, weak: StorageWeakRef, dtype: torch.dtype) -> bool:
        if weak.expired():
            return False
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        return storage is not None and storage.nbytes() == size(dtype)


contexts = set[bool]()
"""Whether layers were computed under autocast."""
reduced = set[str]()
"""Data types in which gradients were reduced and sharded."""


def note_reduced() -> None:
    """Note the data type of gradients that are reduced and sharded."""

    def noting(reduce: Any) -> Any:
        def note(**options: Any) -> Any:
            reduced.add(str(options["input"].dtype))
            return reduce(**options)

        return note

    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # of torch 2.13, and of older
        if hasattr(dist, name):
            setattr(dist, name, noting(getattr(dist, name)))


def size(dtype: torch.dtype) -> int:
    """Bytes of a layer's weight."""
    return WIDTH * WIDTH * dtype.itemsize


class Layer(nn.Module):
    """A linear layer, or the same by a matrix of its own."""

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        linear = nn.Linear(WIDTH, WIDTH, bias=False)
        if is_own:
            self.weight = linear.weight
        else:
            self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        contexts.add(torch.is_autocast_enabled("cpu"))
        return torch.tanh(x @ self.weight.T if hasattr(self, "weight") else self.linear(x))


class Deep(trainer.TrainingModule):
    """Layers one after another; what is alive is counted before the backward."""

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(is_own) for _ in range(LAYERS))
        self.counts: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        with Alive() as alive:
            y = x
            for layer in self.layers:
                y = y + layer(y)
            loss = (y - x.roll(1, dims=1)).square().mean()
        self.counts.append(alive.count())
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(BATCH * 3, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=BATCH)


def main(folder: Path, strategy: str, precision: str, options: str = "{}", *words: str) -> None:
    """Train, and print what was counted."""
    run = trainer.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        strategy_options=json.loads(options),
        precision=precision,
        max_steps=3,
        loggers=[],
        enable_progress_bar=False,
        default_root_dir=folder,
        compile={"regional": ["Layer"]} if "compile" in words else False,
    )
    note_reduced()
    module = Deep("own" in words)
    run.fit(module)
    if run.global_rank == 0:
        found = {"alive": module.counts, "losses": module.losses}
        print(json.dumps(found | {"autocast": [*contexts], "reduced": [*reduced]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
