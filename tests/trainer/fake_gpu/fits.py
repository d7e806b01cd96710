"""Fits on the fake GPUs of this folder: ``python -m fake_gpu.fits DEVICES STRATEGY …``.

Each strategy is fitted with each precision, with what else needs a GPU: asynchronous checkpoints,
fused AdamW, clipping and validation. Rank 0 prints a line for each fit, with its peak of memory.
"""

import gc
import json
import os
import sys
from collections import defaultdict
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fitting import Descends

WIDTH = 512
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp, offload": {"offload": True},
    "mesh, units": {"unit_parameters": 100_000},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.output, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        parts = self.inputs(self.norm(x)).view(batch, time, 3, 8, WIDTH // 8)
        y = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        return x + self.dropout(self.output(y.transpose(1, 2).reshape(x.shape)))


class Model(Descends, by=torch.optim.AdamW, lr=1e-3, fused=True):
    batch_of: Any = staticmethod(lambda rows: {"x": default_collate(rows)[0]})

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.sequential_module(batch["x"]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.ones(64, 4, WIDTH))
        return DataLoader(data, batch_size=4, collate_fn=self.batch_of)

    val_dataloader = train_dataloader


def fit(name: str, precision: str, devices: int) -> int:
    """The peak of allocated memory of a fit."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    model = Model()
    # DDP and FSDP, which would move a batch too, fail on one of this type.
    model.batch_of = lambda rows: defaultdict(Tensor, x=default_collate(rows)[0])
    options = {"val_every_n_steps": 4, "limit_val_batches": 2, "gradient_clip_val": 1.0}
    trainer.Trainer(
        **options,
        strategy=name.partition(",")[0],
        strategy_options=OPTIONS.get(name, {}),
        precision=precision,
        accelerator="gpu",
        devices=devices,
        max_steps=4,
        checkpoint_every_n_steps=2,
        async_checkpoints=True,
        enable_progress_bar=False,
        loggers=["csv"],
        nonfinite_loss="ignore",
        run_name=f"{name}-{precision}".replace(", ", "-"),
    ).fit(model)
    return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    for strategy in sys.argv[2:]:
        for mode in PRECISIONS:
            peak = fit(strategy, mode, int(sys.argv[1]))
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps({"name": strategy, "precision": mode, "peak": peak}), flush=True)
