"""One rank of a start that benchmarks/scale.py measures: JOB, as JSON, and the FOLDER of results.

Each rank writes what it has used after its first step, when it has trained for some seconds, and
at its end: operations of the store by kind, threads, descriptors, memory and processor time.
"""

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
                value.decode() if isinstance(value, bytes) else value for value in arguments
            )
        return getattr(self.store, kind)(*arguments)

    return operation


for name in KINDS:
    setattr(Counting, name, _passed_on(name))
Counting.deleteKey = Counting.delete_key  # type: ignore[attr-defined]  # as C++ calls it


def count_operations() -> None:
    """Count the operations of every store that is created from now on."""
    for name in ("FileStore", "TCPStore"):
        create = getattr(dist, name)
        setattr(dist, name, lambda *a, create=create, **k: Counting(create(*a, **k)))


def entries(folder: str) -> int:
    """Number of entries of a folder, such as that of a process' descriptors in /proc."""
    return sum(1 for _ in Path(folder).iterdir())


def reading() -> dict[str, Any]:
    """What this process has used until now."""
    return {
        "at": time.monotonic(),
        "cpu_s": time.process_time(),
        "operations": counted.total(),
        "kinds": dict(counted),
        "threads": entries("/proc/self/task"),
        "descriptors": entries("/proc/self/fd"),
        "resident_mib": meter.resident(),
        "own_mib": meter.mib_in("/proc/self/smaps_rollup", "Pss:"),
    }


class Tiny(TrainingModule):
    """Two layers, and readings of this rank."""

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.job, self.folder = job, folder
        self.readings: dict[str, Any] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(SECONDS_OF_A_STEP)
        return self.layers(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step in (1, WARMUP):
            self.read("first" if self.global_step == 1 else "warm")
        is_due = "warm" in self.readings and "steady" not in self.readings
        if is_due and time.monotonic() >= self.readings["warm"]["at"] + self.job.seconds:
            self.read("steady")
            path = self.folder / f"rank-{self.global_rank}.json"
            self.write(path)
            atexit.register(self.write_end, path)

    def read(self, moment: str) -> None:
        self.readings[moment] = {"step": self.global_step, **reading()}

    def write(self, path: Path) -> None:
        files.write_atomically(path, json.dumps(self.readings))

    def write_end(self, path: Path) -> None:
        self.readings["end"] = reading()
        self.write(path)

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
