"""Models, data and strategies of test_launch_functions*.py and test_own_strategy.py."""

import atexit
import os
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
import torch.distributed as dist
from my_project_trainer.strategies import Limits
from my_project_trainer.strategies.replicated import ddp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends


class Net(Descends, lr=0.1, momentum=0.9):
    """A small network with statistics of its own, on made-up data, for every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(37)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(11)

    def test_dataloader(self) -> DataLoader[Any]:
        return loader(13)

    def predict_dataloader(self) -> DataLoader[Any]:
        return loader(9)  # of two ranks, the second one has no part of the last batch

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return mse_loss(self(x), y)


def loader(samples: int, **options: Any) -> DataLoader[Any]:
    """Batches of so many samples, the same in every process."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))
    return DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=4, **options)


class Looks(Net):
    """Each rank writes its number into a weight, and then which one it sees there.

    At its process' end it writes down the threads that are left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fits", torch.zeros(2), persistent=False)

    def on_fit_start(self) -> None:
        self.fits += 1
        atexit.register(tell_threads, self.global_rank)
        weight = self.head.bias.data
        weight.fill_(self.global_rank)
        dist.barrier()
        Path(f"sees-{self.global_rank}").write_text(str(weight.item()))
        dist.barrier()
        weight.fill_(0)


def tell_threads(rank: int) -> None:
    """Write down the names of this process' threads."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    Path(f"threads-{rank}").write_text("".join(names))


class Raises(Net):
    """Rank 1 raises in its second step, while a worker of its loader is alive."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 1:
            raise self.error()
        return super().training_step(batch, batch_idx)

    def error(self) -> Exception:
        return ArithmeticError("planted on rank 1")

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(37, num_workers=1)


class RaisesUserError(Raises):
    def error(self) -> Exception:
        return trainer.UserError("a planted mistake")


class Sleeps(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Path(f"rank-{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(60)
        return super().training_step(batch, batch_idx)


class WithLambda(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.activation = lambda x: x


class PredictsLambda(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return lambda: batch


class WithFile(trainer.DataModule):
    def __init__(self) -> None:
        self.file = Path(__file__).open()  # noqa: SIM115

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(37)


class Mine(ddp.DDP):
    """Forms its group and wraps the model in its own way, and says so."""

    def __init__(self, greeting: str = "hello", **options: Any) -> None:
        super().__init__(**options)
        self.greeting = greeting

    def init_process_group(self, layout: Any, device: torch.device) -> None:
        super().init_process_group(layout, device)
        _note(f"{self.greeting} from {dist.get_rank()} of {dist.get_world_size()}")

    def wrap(self, module: nn.Module) -> Any:
        _note(f"wraps {type(module.module).__name__}")
        return super().wrap(module)


class MineSpawned(Mine):
    """The same, in processes that are spawned."""

    limits = Limits(launcher="spawn")


trainer.register("mine", Mine)
trainer.register("mine_spawned", MineSpawned)


def _note(line: str) -> None:
    with Path(f"notes-{os.environ['RANK']}").open("a") as file:
        file.write(f"{line}\n")
