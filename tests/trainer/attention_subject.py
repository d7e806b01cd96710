"""A transformer of torch's own layers, under a strategy.

``python -m attention_subject FOLDER STRATEGY DEVICES PRECISION OPTIONS`` trains and validates
it, and prints what was logged.
"""

import json
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LENGTH, SAMPLES = 16, 5, 12


class Encoder(trainer.TrainingModule):
    """Attention in each of its forms: in an encoder, which in validation takes paths of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, missing: Tensor) -> Tensor:
        is_missing = torch.arange(LENGTH) >= LENGTH - missing[:, None]
        x = self.encoder(x, src_key_padding_mask=is_missing)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x[:, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, missing, y = batch
        loss = (self(x, missing) - y).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, missing, y = batch
        self.log("val_loss", (self(x, missing) - y).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
        # Samples are shorter by up to two, and filled up at their end.
        missing = torch.arange(SAMPLES) % 3
        return DataLoader(TensorDataset(x, missing, x.mean((1, 2))[:, None]), batch_size=6)

    val_dataloader = train_dataloader


def main(folder: Path, strategy: str, devices: str, precision: str, options: str) -> None:
    """Train two epochs, each with a validation."""
    run = trainer.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=strategy,
        strategy_options=json.loads(options),
        precision=precision,
        global_batch_size=6,
        max_epochs=2,
        loggers=[],
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    run.fit(Encoder())
    if run.global_rank == 0:
        print(json.dumps(run.metrics))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[4] != "32-true":  # torch's own path for inference fails under autocast on CPUs
        torch.backends.mha.set_fastpath_enabled(False)
    main(Path(sys.argv[1]), *sys.argv[2:])
