"""One rank of a start that benchmarks/scale.py measures: JOB, as JSON, and the FOLDER of results.

Each rank writes what it has used after its first step, when it has trained for some seconds, and
at its end: operations of the store by kind, threads, descriptors, memory and processor time.
"""

from __future__ import annotations

import atexit
import collections
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.launch import files
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meter

# As if a device computed: 64 ranks that compute all the time would keep each other waiting.
SECONDS_OF_A_STEP = 0.2
WARMUP = 10  # steps, in which ranks agree on what repeats


@dataclass(frozen=True)
class Job:
    """A start: `ranks` on each of `nodes`, that train for some seconds until they are stopped."""

    strategy: str
    ranks: int
    nodes: int = 1
    seconds: float = 5.0


# --- operations of the store ----------------------------------------------------------------------

counted: collections.Counter[str] = collections.Counter()
# C++ code keeps a store alive, but not the Python object that has its methods.
kept: list[dist.Store] = []
KINDS = (
    *("set", "get", "compare_set", "add", "wait", "check", "append", "delete_key"),
    *("multi_get", "multi_set", "num_keys"),
)


class Counting(dist.Store):
    """Counts each operation, of the trainer and of torch's C++ code, and passes it on."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store
        kept.append(self)

    def has_extended_api(self) -> bool:
        return bool(self.store.has_extended_api())  # type: ignore[attr-defined]

    @property
    def port(self) -> int:
        return int(self.store.port)  # type: ignore[attr-defined]


def _passed_on(kind: str) -> Any:
    def operation(self: Counting, *arguments: Any) -> Any:
        counted[kind] += 1
        if kind == "compare_set":  # it is given bytes, and takes texts
            arguments = tuple(
                each.decode() if isinstance(each, bytes) else each for each in arguments
            )
        return getattr(self.store, kind)(*arguments)

    return operation


for each in KINDS:
    setattr(Counting, each, _passed_on(each))
Counting.deleteKey = Counting.delete_key  # type: ignore[attr-defined]  # as C++ calls it


def count_operations() -> None:
    """Count the operations of every store that is created from now on."""
    for name in ("FileStore", "TCPStore"):
        create = getattr(dist, name)
        setattr(dist, name, lambda *a, create=create, **k: Counting(create(*a, **k)))


# --- what is trained ------------------------------------------------------------------------------


def entries(folder: str) -> int:
    """Number of entries of a folder, such as that of a process' descriptors in /proc."""
    return sum(1 for _ in Path(folder).iterdir())


def reading() -> dict[str, Any]:
    """What this process has used until now."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (own,) = (int(line.split()[1]) / 1024 for line in rollup if line.startswith("Pss:"))
    return {
        "at": time.monotonic(),
        "cpu_s": time.process_time(),
        "operations": dict(counted),
        "threads": entries("/proc/self/task"),
        "descriptors": entries("/proc/self/fd"),
        "resident_mib": meter.resident(),
        "own_mib": own,
    }


class Tiny(TrainingModule):
    """Two layers, and readings of this rank."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.job, self.folder = job, folder
        self.found: dict[str, Any] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(SECONDS_OF_A_STEP)
        return self.layers(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "steady" in self.found:
            return
        step = self.global_step
        name = {1: "first", WARMUP: "warm"}.get(step)
        warm = self.found.get("warm")
        if warm and step > WARMUP and time.monotonic() >= warm["at"] + self.job.seconds:
            name = "steady"
        if name:
            self.found[name] = {"step": step, **reading()}
        if name == "steady":
            self.path = self.folder / f"rank-{self.global_rank}.json"
            self.write()
            atexit.register(self.write_end)

    def write(self) -> None:
        files.write_atomically(self.path, json.dumps(self.found))

    def write_end(self) -> None:
        self.found["end"] = reading()
        self.write()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.001)

    def train_dataloader(self) -> DataLoader[Any]:
        batch = self.job.ranks * self.job.nodes
        return DataLoader(TensorDataset(torch.zeros(batch * 1000, 8)), batch_size=1)


def main() -> None:
    job, folder = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    count_operations()
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=job.ranks,
        num_nodes=job.nodes,
        strategy=job.strategy,
        default_root_dir=folder / "runs",
        run_name="run",
        max_epochs=1_000_000,
        enable_progress_bar=False,
        loggers=["csv"],
    )
    trainer.fit(Tiny(job, folder))


if __name__ == "__main__":
    main()
