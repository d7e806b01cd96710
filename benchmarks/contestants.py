"""One measurement of one contestant in a fresh process; its last line is JSON.

python benchmarks/contestants.py '{"contestant": "bundled", "variant": "bare", "steps": 400}'
"""

import dataclasses
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from child import argument, end_with
from job import Job
from meter import Meter, Reading
from subjects import SUBJECTS, Net

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
CLIP = 1.0


class GpuMeter(Meter):
    """Waits for the GPU before it reads the clocks, and reads the memory of the window."""

    def read(self) -> Reading:
        torch.cuda.synchronize()
        if self.count == self.job.warmup + 1:
            torch.cuda.reset_peak_memory_stats()
        # A GPU computes while the thread waits for a core.
        return dataclasses.replace(super().read(), waited=0)

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20


class Run:
    """What all contestants share: the model, its data and optimizer, and the meter."""

    def __init__(self, job: Job) -> None:
        self.job = job
        torch.manual_seed(0)
        self.net: Net = SUBJECTS[job.subject]()
        self.meter = GpuMeter(job) if job.device == "cuda" else Meter(job)
        self.loss: Tensor | None = None

    def loader(self, is_sharded: bool = False) -> DataLoader[Any]:
        """Shuffled batches, an epoch for each process; trainers shard them by themselves."""
        count = self.job.epoch * self.job.batch * WORLD_SIZE
        dataset = TensorDataset(*self.net.samples(count, torch.Generator().manual_seed(0)))
        return DataLoader(
            dataset,
            batch_size=self.job.batch,
            shuffle=not is_sharded,
            sampler=DistributedSampler(dataset) if is_sharded else None,
            pin_memory=self.job.device == "cuda",
        )

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        rate = 3e-4 if self.job.mixed else 1e-3
        return torch.optim.AdamW(net.parameters(), lr=rate, fused=self.job.fused)

    def result(self) -> dict[str, float]:
        """The meter's, and a loss: on a GPU the last step's, as `net` may be in any state."""
        result = self.meter.result()  # before the forward below, which needs memory
        loss = self.net.final_loss() if self.loss is None else float(self.loss)
        return result | {"loss": loss}


# --- hand-written loops ---------------------------------------------------------------------------


def batches(loader: DataLoader[Any], steps: int) -> Iterator[Any]:
    """Return the batches of as many epochs as the steps need."""

    def epochs() -> Iterator[DataLoader[Any]]:
        for epoch in itertools.count():
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            yield loader

    return itertools.islice(itertools.chain.from_iterable(epochs()), steps)


def loop(run: Run) -> None:
    """Train by a hand-written loop: nothing but what training needs. The measure of all others."""
    net: nn.Module = run.net
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(run.net)
    loader, optimizer = run.loader(is_sharded=WORLD_SIZE > 1), run.optimizer(net)
    net.train()
    for x, y in batches(loader, run.job.total):
        run.meter.tick()
        optimizer.zero_grad()
        net(x, y).backward()
        optimizer.step()


def mixed_loop(run: Run, is_compiled: bool = False) -> None:
    """Train in half precision, with clipping, by a hand-written loop."""
    job = run.job
    net = run.net.to(job.device)
    optimizer = run.optimizer(net)
    net.train()
    if is_compiled:
        net.compile()
    for batch in batches(run.loader(), job.total):
        run.meter.tick()
        tokens, targets = (tensor.to(job.device, non_blocking=True) for tensor in batch)
        with torch.autocast(job.device, torch.bfloat16):
            loss = net(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        run.loss = loss.detach()


def accelerate(run: Run) -> None:
    """Train by a hand-written loop with the `prepare` and `backward` of Accelerate."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True)
    net, optimizer, loader = accelerator.prepare(run.net, run.optimizer(run.net), run.loader())
    net.train()
    for x, y in batches(loader, run.job.total):
        run.meter.tick()
        optimizer.zero_grad()
        accelerator.backward(net(x, y))
        optimizer.step()


# --- trainers -------------------------------------------------------------------------------------


def bundled(run: Run, **options: Any) -> None:
    """Train by the rendered project's trainer."""
    from my_project_trainer import Callback, Trainer, TrainingModule
    from my_project_trainer.callbacks.measuring import SystemMonitor

    class Counter(Callback):
        """A callback of a user, called in every step."""

        count = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

    class Counting(TrainingModule):
        """Says what tokens and operations there are."""

        flops_per_sample = 6.0 * sum(parameter.numel() for parameter in run.net.parameters())

        def count_tokens(self, batch: list[Tensor]) -> int:
            return batch[0].numel()

    variants: dict[str, dict[str, Any]] = {
        # It saves at the end of every epoch in any case: there is no switch for that.
        "bare": {"loggers": [], "enable_progress_bar": False},
        "logging": {"loggers": ["csv"], "enable_progress_bar": False},
        "everything": {},
        "numbers": {
            "callbacks": [Counter(), SystemMonitor()],
            "log_gradient_norm": True,
            "peak_flops": 1e11,
        },
    }
    base = Counting if run.job.variant == "numbers" else TrainingModule
    trainer = Trainer(**shared_options(run.job), **variants[run.job.variant], **options)
    trainer.fit(module_of(base, run))


def lightning(run: Run) -> None:
    """Train by Lightning: bare, with a CSV logger, and with everything it does by default."""
    # A package of one of these names is installed.
    name = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    package: Any = importlib.import_module(name)
    bare = {"enable_checkpointing": False, "enable_progress_bar": False}
    bare |= {"enable_model_summary": False, "logger": False}
    variants: dict[str, dict[str, Any]] = {
        "bare": bare,
        "logging": bare | {"logger": package.loggers.CSVLogger(".")},
        # Its bar is the quicker of the two it has, since `rich` is installed.
        "everything": {},
    }

    class Clipping(package.LightningModule):  # type: ignore[misc]
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            """Clip here: Lightning's own way refuses fused optimizers in half precision."""
            nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)

    base = Clipping if run.job.mixed else package.LightningModule
    trainer = package.Trainer(**shared_options(run.job), **variants[run.job.variant])
    trainer.fit(module_of(base, run))


def shared_options(job: Job) -> dict[str, Any]:
    """Return what both trainers are given, by the same names."""
    options: dict[str, Any] = {"max_steps": job.total, "log_every_n_steps": 50}
    options |= {"accelerator": "gpu" if job.device == "cuda" else "cpu", "devices": WORLD_SIZE}
    if WORLD_SIZE > 1:
        options["strategy"] = "ddp"
    if job.mixed:
        options |= {"precision": "bf16-mixed", "gradient_clip_val": CLIP}
    return options


def module_of(base: Any, run: Run) -> Any:
    """Return the model as a module of a trainer; both trainers ask for the same methods."""
    is_logging, is_mixed = run.job.variant != "bare", run.job.mixed

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = run.net

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            run.meter.tick()
            loss: Tensor = self.net(*batch)
            if is_logging:
                self.log("loss", loss, prog_bar=True)
            if is_mixed:
                run.loss = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.optimizer(self.net)

        def train_dataloader(self) -> DataLoader[Any]:
            return run.loader()

    return Module()


CONTESTANTS: dict[str, Callable[[Run], None]] = {
    "raw": loop,
    "bundled": bundled,
    "accelerate": accelerate,
    "lightning": lightning,
    "loop": mixed_loop,
    "bundled_fsdp": partial(bundled, strategy="fsdp"),
    "loop_compiled": partial(mixed_loop, is_compiled=True),
    "bundled_compiled": partial(bundled, compile=True),
}


def main() -> None:
    job = Job(**argument())
    if job.device == "cpu":
        torch.set_num_threads(1)
    if job.mixed:  # what the trainer sets by itself is the same for all
        torch.set_float32_matmul_precision("high")
    run = Run(job)
    CONTESTANTS[job.contestant](run)
    end_with(run.result())


if __name__ == "__main__":
    main()
