"""Counts the bytes that saves and resumes read and hold.

``python -m memory_subject FOLDER DEVICES STRATEGY …`` trains a step under each strategy, and a
second one after a resume. Each rank writes ``STRATEGY-RANK.json``: what its last save has held
beside what was there before, and what its resume has held and read.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from my_project_trainer.loop.fit import FitLoop
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet

LAYERS, WIDTH = 8, 64
TENSOR = 4 * WIDTH * WIDTH  # bytes
OPTIONS = {"fsdp": {"unit_parameters": 1}}


class Counting(TorchDispatchMode):
    """Counts the most bytes that new tensors hold, and the bytes of checkpoints that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.read = self.new = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: dict[int, tuple[StorageWeakRef, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {block.data_ptr(): block for block in storages((args, kwargs))}
        for pointer, made in {block.data_ptr(): block for block in storages(result)}.items():
            if pointer not in inputs and made.nbytes():
                self._live[pointer] = StorageWeakRef(made), made.nbytes()
                self.new += 1
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.held = max(self.held, sum(size for _, size in self._live.values()))
        kept = {block.data_ptr() for block in storages(result)}
        for tensor in tensors((args, kwargs)):
            storage = local(tensor).untyped_storage()
            if storage.data_ptr() not in kept and self._is_file(storage):  # not a view
                self.read += tensor.nbytes
        return result

    def _is_file(self, storage: torch.UntypedStorage) -> bool:
        """Ask once for each storage: the table of what is mapped is long."""
        known = self._known.get(storage.data_ptr())
        if known is None or known[0].expired():
            known = StorageWeakRef(storage), is_file(storage)
            self._known[storage.data_ptr()] = known
        return known[1]


def tensors(tree: Any) -> Iterator[Tensor]:
    """Those in host memory."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            yield leaf


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (local(tensor).untyped_storage() for tensor in tensors(tree))


def local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def is_file(storage: torch.UntypedStorage) -> bool:
    """Whether memory is that of a checkpoint's file."""
    pointer = storage.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            start, end = (int(word, 16) for word in line.split(maxsplit=1)[0].split("-"))
            if start <= pointer < end:
                return True
    return False


def counted(call: Callable[..., Any], noted: dict[str, int]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with Counting() as counting:
            result = call(*args, **kwargs)
        noted.update(held=counting.held, read=counting.read)
        return result

    return run


class Layers(Descends, by=torch.optim.Adam, lr=1e-3):
    """Equal tensors only, so that each rank's share of all is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=1)


def main(folder: Path, devices: int, strategies: list[str]) -> None:
    save = FitLoop._save_once
    for strategy in strategies:
        noted: dict[str, dict[str, int]] = {"save": {}, "resume": {}}
        FitLoop._save_once = counted(save, noted["save"])
        for steps, name in ((1, "first"), (2, "second")):
            run = quiet(
                **{"devices": devices, "strategy": strategy, "max_steps": steps},
                **{"strategy_options": OPTIONS.get(strategy, {}), "default_root_dir": folder},
                run_name=f"{strategy}-{name}",
                resume=str(folder / f"{strategy}-first") if steps == 2 else None,
            )
            plan: Any = run._plan.strategy
            plan.load_state = counted(plan.load_state, noted["resume"])
            run.fit(Layers())
        (folder / f"{strategy}-{run.global_rank}.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
