"""Saves after every step, synchronously and asynchronously, for a comparison of the files.

``python -m background_subject FOLDER DEVICES STRATEGY CASE …`` trains each case with and without
``async_checkpoints``, into ``CASE-async`` and ``CASE-sync``. Writing begins late, so that the next
step comes first.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from my_project_trainer.callbacks import EMA
from my_project_trainer.checkpoint.writing import Checkpoints
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet

WIDTH, STEPS = 192, 4  # half a weight is larger than what is copied at once


class Model(Descends, by=torch.optim.AdamW, lr=0.01):
    """Two large weights, of which one is used twice, and Adam's moments of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.again = self.first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.again(self.second(self.first(batch[0])).relu()).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(8 * STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=4)


class Normed(Model):
    """Buffers change in each forward, and are large."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step([self.norm(batch[0])], batch_idx)


class Clamped(Model):
    """Changes its weights in a step, before the optimizer does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        return super().training_step(batch, batch_idx)


class Manual(Model):
    """Steps two optimizers, the first one twice, and once without the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in (*self.optimizers(), self.optimizers()[0]):
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers()[1].optimizer.step()
        self.optimizers()[1].zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (self.first, self.second)]


CASES: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "plain": (Model, {}),
    "accumulated": (Model, {"accumulate_grad_batches": 2}),
    "batchnorm": (Normed, {}),
    "clamped": (Clamped, {}),
    "ema": (Model, {"callbacks": [EMA(0.5)]}),
    "manual": (Manual, {}),
}


def main(folder: Path, devices: int, strategy: str, cases: list[str]) -> None:
    write = Checkpoints._write

    def late(*arguments: Any) -> None:
        time.sleep(0.05)
        write(*arguments)

    Checkpoints._write = late  # type: ignore[method-assign]
    options = {"fsdp": {"unit_parameters": 1}}.get(strategy, {})
    for case in cases:
        model, more = CASES[case]
        for name in ("sync", "async"):
            quiet(
                **{"devices": devices, "strategy": strategy, "strategy_options": options},
                **{"max_steps": STEPS, "keep_checkpoints": STEPS, "default_root_dir": folder},
                **{"checkpoint_every_n_steps": 1, "async_checkpoints": name == "async"},
                **{"run_name": f"{case}-{name}", **more},
            ).fit(model())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
