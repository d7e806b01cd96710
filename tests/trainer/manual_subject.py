"""Models with manual optimization, and what they see of it on each rank.

``python -m manual_subject PROCESSES FOLDER [OPTION VALUE …]`` trains them all, each rank
writing a file a model; options are the trainer's.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from my_project_trainer.checkpoint.dtensors import local
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, draw, quiet

SAMPLES = 48


class ByHand(Descends, lr=0.1, momentum=0.9):
    """A regression with manual optimization; the same weights and data in every process."""

    automatic_optimization = False

    def __init__(self, accumulate: int = 1, batch_size: int = 8) -> None:
        super().__init__()
        self.accumulate, self.batch_size = accumulate, batch_size
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen: dict[str, Tensor] = {}
        draw(self, 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        ends_step = self.ends_step(batch_idx)
        with optimizer.toggle_model(sync_grad=ends_step):
            loss = self.loss(batch)
            self.manual_backward(loss / self.accumulate)
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)

    def ends_step(self, batch_idx: int) -> bool:
        return (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return mse_loss(self.network(x), y)

    def see(self, name: str, value: Tensor | None) -> None:
        """Keep a value as it is now; nothing is kept of ``None``."""
        if value is not None:
            self.seen[name] = value.detach().clone()

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), self.batch_size)


class Accumulates(ByHand):
    def __init__(self) -> None:
        super().__init__(accumulate=2, batch_size=4)


class Clips(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch) / 2
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        if batch_idx % 2 == 0:
            optimizer.clip_gradients(0.02)
        else:
            optimizer.clip_gradients(0.005, "value")
        optimizer.step()
        optimizer.zero_grad()


class Watches(ByHand):
    """Two networks, both accumulating two batches; sees their gradients and all collectives."""

    def __init__(self) -> None:
        super().__init__(accumulate=2)
        self.other = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ends_step = self.ends_step(batch_idx)
        for name, optimizer in zip(("network", "other"), self.optimizers(), strict=True):
            with (
                mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
                optimizer.toggle_model(sync_grad=ends_step),
            ):
                x, y = batch
                self.manual_backward(mse_loss(self.network(x) + self.other(x), y))
            self.see(f"{batch_idx}.{name}.collectives", torch.tensor(all_reduce.call_count))
            for parameter_name, parameter in self.named_parameters():
                self.see(f"{batch_idx}.{name}.gradient.{parameter_name}", parameter.grad)
        if ends_step:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [SGD(module.parameters(), lr=0.1) for module in (self.network, self.other)]


class Unused(ByHand):
    """A part that only one rank uses, in one batch of two, or whose gradient is given up again."""

    # Of each batch: the ranks that use the part, and whether backward synchronizes.
    PLAN = (({0}, True), ({1}, False), (set(), True), ({0, 1}, False), (set(), True), (set(), True))

    def __init__(self) -> None:
        super().__init__(batch_size=4)
        self.part = nn.Linear(4, 1, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        optimizer = self.optimizers()
        ranks, synchronizes = self.PLAN[batch_idx]
        loss = self.loss(batch)
        if self.global_rank in ranks:
            own_loss = self.part(x).square().mean()
            (alone,) = torch.autograd.grad(own_loss, [self.part.weight], retain_graph=True)
            self.see(f"{batch_idx}.alone", alone)
            loss = loss + own_loss
        with optimizer.toggle_model(sync_grad=synchronizes):
            self.manual_backward(loss)
        self.see(f"{batch_idx}.part", self.part.weight.grad)
        self.see(f"{batch_idx}.network", self.network[0].weight.grad)
        if synchronizes or batch_idx == 3:
            optimizer.zero_grad()


class Frozen(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.network[0].requires_grad_(True)
        super().training_step(batch, batch_idx)
        self.see(f"{batch_idx}.weight", self.network[0].weight)


MODELS = (Accumulates, Watches, Unused, Frozen, Clips)


def main(processes: int, folder: Path, *options: str) -> None:
    """Train every model once, or the one that ``--only`` names."""
    folder.mkdir(exist_ok=True)
    arguments = dict(zip(options[::2], options[1::2], strict=True))
    only = arguments.pop("--only", None)
    for model in MODELS:
        if only not in (None, model.__name__):
            continue
        options = {name.removeprefix("--"): _value(value) for name, value in arguments.items()}
        shared = {"max_epochs": 1, "default_root_dir": folder / model.__name__}
        run = quiet(devices=processes, **shared | options)
        module = model()
        run.fit(module)
        tensors = {name: local(tensor).contiguous() for name, tensor in module.state_dict().items()}
        save_file(tensors | module.seen, folder / f"{model.__name__}.{run.global_rank}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
