"""Models that engines easily get wrong; each rank writes what it has seen.

``python -m odd_subject FOLDER SUBJECT OPTIONS`` fits a subject with a trainer's options
(JSON), and writes ``notes-RANK.json`` into the folder.
"""

import json
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import my_project_trainer as trainer
import torch
import torch.distributed as dist
from my_project_trainer.checkpoint import reading
from my_project_trainer.checkpoint.dtensors import full, is_sharded
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, draw, quiet

WIDTH = 8
NOTES: list[dict[str, Any]] = []


class Base(trainer.TrainingModule):
    """The same made-up data and parameters in every process."""

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(48)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(37)

    def loader(self, samples: int) -> DataLoader[Any]:
        x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(x, x.roll(1, dims=1).sin()), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", mse_loss(self(batch[0]), batch[1]))


class Noting(torch.optim.Adam):
    """Writes down what lies on this rank before each step."""

    is_elementwise = True

    module: nn.Module

    def step(self, closure: Any = None) -> Any:
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        state = [value for values in self.state.values() for value in values.values()]
        NOTES.append(
            {
                "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
                "gradients": sum(gradient.numel() for gradient in gradients),
                "state": sum(tensor.numel() for tensor in state if tensor.ndim > 0),
                "norm": math.sqrt(sum(float(full(p.grad.double().square().sum())) for p in ours)),
            }
        )
        return super().step(closure)


class Even(Base):
    """Four layers of one size, which two or four ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        draw(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        Noting.module = self
        return Noting(self.parameters(), lr=0.01)


class Odd(Base):
    """What is easily got wrong: tied weights, a parameter of the root's own and one without
    dimensions, attention, frozen and unused parameters, a buffer in float64, groups by shape, and
    an optimizer that has a state from the start."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention = nn.MultiheadAttention(WIDTH // 2, 2, batch_first=True)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        draw(self)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += 0.1
        x = self.first(x * self.scale + self.shift).view(-1, 2, WIDTH // 2)
        x = self.attention(x, x, x)[0].reshape(-1, WIDTH)
        for block in self.blocks:
            x = block(self.frozen(x)).tanh()
        return self.last(x)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        blocks = set(self.blocks.parameters())
        rest = [parameter for parameter in self.parameters() if parameter not in blocks]
        groups = [
            {"params": [weight for weight in rest if weight.ndim > 1], "weight_decay": 0.5},
            {"params": [weight for weight in rest if weight.ndim <= 1], "weight_decay": 0.0},
        ]
        return [
            # Not Adam: it makes steps of the zeros that some gradients of attention are.
            torch.optim.SGD(groups, lr=0.05, momentum=0.9),
            torch.optim.Adagrad(self.blocks.parameters(), lr=0.05, initial_accumulator_value=0.1),
        ]


class Waiting(Even):
    """The gradient of its bias lies, of one sample, in memory that backward computes with yet."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(0.05))
        return x + self.bias.view(1, -1)


class Thawing(Odd):
    """Its frozen layer is trained from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.frozen.requires_grad_(self.current_epoch > 0)


class OddAtOnce(Descends, Odd, lr=0.05, momentum=0.9):
    """The same with one optimizer that computes element by element."""


class Freezing(OddAtOnce):
    """A layer is trained in the first epoch only."""

    def on_train_epoch_start(self) -> None:
        self.blocks[0].requires_grad_(self.current_epoch == 0)


class Changing(Even):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return mse_loss(self(self.side(x) if batch_idx % 2 == 0 else x), y)


class Routed(Descends, Even, lr=0.05):
    """Each rank uses an expert of its own, all of one size, and none uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for expert in self.chosen():
            x = self.experts[expert](x)
        return mse_loss(self(x), y)

    def chosen(self) -> list[int]:
        return [self.global_rank]


class RoutedLater(Routed):
    """From the fourth step on, one rank leaves out an expert that all have used."""

    def chosen(self) -> list[int]:
        return [0] if self.global_step >= 3 and self.global_rank == 1 else [0, 1]


class RoutedLast(Routed):
    """In its last step, one rank leaves out an expert that all have used."""

    def chosen(self) -> list[int]:
        return [0] if self.global_step == 5 and self.global_rank == 1 else [0, 1]


class RoutedTogether(Routed):
    """All ranks change their expert in every step."""

    def chosen(self) -> list[int]:
        return [self.global_step % 2]


class RoutedRaw(Routed):
    """The experts are no modules, which could be seen to be called."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.weights = nn.ParameterList(torch.eye(WIDTH) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return mse_loss(self(x @ self.weights[self.global_rank]), y)


class Recalled(Even):
    """Calls one of its units several times, and others again for their backward.

    Notes what comparing the use of parameters has cost so far: operations, and keys that are left.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for _ in range(3):
            x = self.layers[0](x)
        x = checkpoint(self.layers[1:], x, use_reentrant=False)
        return mse_loss(self.layers[0](x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        counted = CountedStore
        keys = {"set": sorted(counted.keys), "deleted": sorted(counted.deleted)}
        NOTES[-1] |= {"operations": counted.operations, "keys": keys}


class CountedStore(dist.PrefixStore):
    """Counts what this rank's main thread does in the store."""

    operations = 0
    keys: ClassVar[set[str]] = set()
    deleted: ClassVar[set[str]] = set()

    def _count(self, key: str) -> None:
        if threading.current_thread() is threading.main_thread():
            CountedStore.operations += 1
            CountedStore.keys.add(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count(key)
        return super().compare_set(key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        return super().add(key, amount)

    def set(self, key: str, value: str) -> None:
        self._count(key)
        super().set(key, value)

    def delete_key(self, key: str) -> bool:
        CountedStore.deleted.add(key)
        return super().delete_key(key)


class Single(Even):
    """One parameter: a second rank has none to step, and so no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:1]


class Twice(Even):
    """A parameter in two optimizers, which manual optimization allows."""

    automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Double(Even):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].double()


def main(folder: Path, subject: str, options: str) -> None:
    """Fit, test what came of it, and test it again from its checkpoint."""
    dist.PrefixStore = CountedStore  # of the trainer only: torch has imported its own by name
    module = globals()[subject]()
    defaults = {"loggers": ["csv"], "default_root_dir": folder, "run_name": "run"}
    run = quiet(**defaults | json.loads(options))
    run.fit(module)
    saved = reading.Checkpoint(reading.resolve(run.run_directory)).state()["precision"]
    facts = {"notes": NOTES, "scale": saved.get("scale")}
    if any(map(is_sharded, module.parameters())):
        module = globals()[subject]()
    else:
        facts["tested"] = run.test(module)["test_loss"]
    tested = run.test(module, checkpoint=str(run.run_directory))
    facts["tested_from_checkpoint"] = tested["test_loss"]
    (folder / f"notes-{run.global_rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
