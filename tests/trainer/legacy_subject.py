"""Plugins and modules of test_legacy_plugins.py, written as for Lightning 1.x."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from my_project_trainer import legacy
from my_project_trainer.legacy import DDPPlugin, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from fitting import saved


class OwnDDP(DDPPlugin):
    """Makes the process group and the wrapper, as the documentation of Lightning 1.2 says."""

    def init_ddp_connection(self, global_rank: int, world_size: int) -> None:
        dist.init_process_group("gloo", rank=global_rank, world_size=world_size)
        Path(f"connected-{global_rank}").write_text(str(world_size))

    def configure_ddp(self) -> None:
        self.model = DistributedDataParallel(self.model, find_unused_parameters=True)
        Path(f"wrapped-{dist.get_rank()}").touch()


class Extended(DDPPlugin):
    def init_ddp_connection(self, global_rank: int, world_size: int) -> None:
        super().init_ddp_connection(global_rank, world_size)
        Path(f"connected-{global_rank}").write_text(str(world_size))

    def configure_ddp(self) -> None:
        super().configure_ddp()
        bucket = self.model.bucket_bytes_cap // 2**20
        Path(f"wrapped-{dist.get_rank()}").write_text(str(bucket))


class NotWrapped(DDPPlugin):
    def configure_ddp(self) -> None:
        pass


class Model(LightningModule):
    """The layers to split are in ``sequential_module``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)]
        self.sequential_module = nn.Sequential(*layers)
        self.unused = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.sequential_module(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=4)


def main(arguments: dict[str, Any], plugin: str | None, options: dict[str, Any]) -> None:
    """Fit by the arguments of a trainer, with a plugin of this file or of older trainers."""
    if plugin is not None:
        cls = globals().get(plugin) or getattr(legacy, plugin)
        arguments["plugins"] = [cls(**options)]
    model = Model()
    arguments |= {"max_epochs": 2, "logger": False, "enable_progress_bar": False}
    trainer = legacy.Trainer(**arguments)
    trainer.fit(model, Numbers())
    if trainer.global_rank == 0:
        torch.save(saved(trainer.run_directory), "weights.pt")


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
