"""A language model with tied weights, and all that is done with it under a strategy.

``python -m sharding_subject FOLDER STRATEGY DEVICES [meta]`` writes ``values.json`` and
``weights.safetensors``, and each rank a line of what it holds.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.checkpoint import dtensors
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from fitting import Descends, quiet, saved

TOKENS, WIDTH, LENGTH = 12, 8, 5
SAMPLES = 25  # in evaluation the last batch has one sample: some rank has no part of it


class Sequences(Dataset[Tensor]):
    """Each token is followed by a fixed other one, but for a few."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        start = torch.tensor([index, index * 5 + 1, index * 7 + 2])
        return torch.cat([start, start[:2] * 3 + index // 4]) % TOKENS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Tied(trainer.TrainingModule):
    def __init__(self, folder: str = ".") -> None:
        super().__init__()
        self.folder = Path(folder)
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.accuracy = MulticlassAccuracy(TOKENS, average="micro")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("largest", float(batch.max()), reduce_fx="max")
        self.log("count", len(batch), reduce_fx="sum")
        self.accuracy.update(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        self.log("accuracy", self.accuracy)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)[:, -1]

    def loss(self, batch: Tensor) -> Tensor:
        return cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return self.optimizer

    def on_train_epoch_end(self) -> None:
        """Write down how many elements lie in this process."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        held = {"parameters": elements(self.parameters()), "states": elements(states)}
        (self.folder / f"held-{self.global_rank}.json").write_text(json.dumps(held))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Sequences(), batch_size=4)

    val_dataloader = predict_dataloader = train_dataloader


class Begins(Descends, Tied, lr=0.0):
    """Keeps its initial weights, and the names of layers that are initialized here."""

    def __init__(self, folder: str = ".") -> None:
        super().__init__(folder)
        self.drawn: list[str] = []
        self.parallelize_plan = {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
        }

    def initialize(self, name: str, layer: nn.Module) -> None:
        self.drawn.append(name)
        super().initialize(name, layer)

    def on_fit_end(self) -> None:
        (self.folder / f"drawn-{self.global_rank}.json").write_text(json.dumps(self.drawn))


class Overflows(Tied):
    """The gradient of one row alone, which lies in one process, overflows."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        row = torch.zeros(4 * WIDTH).index_fill(0, torch.tensor([-1]), 1e38)
        return loss + (self.blocks[0].up(torch.ones(WIDTH)).float() * row).sum()


def elements(tensors: Iterator[Tensor]) -> int:
    """That lie here, in tensors of more than one."""
    return sum(dtensors.local(tensor).numel() for tensor in tensors if tensor.numel() > 1)


def main(folder: str, strategy: str, devices: str, *words: str) -> None:
    """Train, and with the trained weights predict."""
    options = {"unit_parameters": 200} if strategy in ("fsdp", "hsdp") else {}
    shared = {"strategy": strategy, "devices": int(devices), "strategy_options": options}
    shared |= {"max_epochs": 2, "global_batch_size": 12, "log_every_n_steps": 1, "run_name": "run"}
    shared |= {"loggers": ["csv"], "meta_device": "meta" in words, "default_root_dir": folder}
    run = quiet(**shared)
    with run.building():
        module = Tied(folder)
    run.fit(module)
    metrics, directory = run.metrics, str(run.run_directory)
    with run.building():
        fresh = Tied(folder)
    predictions = torch.cat(run.predict(fresh, checkpoint=directory))
    threads = [(path / "comm").read_text() for path in Path("/proc/self/task").iterdir()]
    (Path(folder) / f"threads-{run.global_rank}").write_text("".join(threads))
    if run.global_rank == 0:
        weights = {key: value.clone() for key, value in saved(directory).items()}
        save_file(weights | {"predictions": predictions}, Path(folder) / "weights.safetensors")
        (Path(folder) / "values.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(*sys.argv[1:])
