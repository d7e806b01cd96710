"""Trains a GPT uncompiled and compiled in each way; started by ``test_compile_strategies.py``.

``python -m compile_subject FOLDER DEVICES STRATEGY OPTIONS BACKEND [WAY …]`` prints, for each way,
the losses, the norms of weights, and how many graphs torch has captured, and loaded from its
cache. OPTIONS are the trainer's.
"""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from my_project_trainer.loop import compilation
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fitting import Descends, quiet, saved
from my_project.tasks.language_model import LanguageModel

CONTEXT, SAMPLES, BATCH, STEPS = 8, 16, 8, 3
WAYS: dict[str, Any] = {
    "none": False,
    "parts": True,
    "whole": True,
    "regional": {"regional": True, "dynamic": False},
    "named": {"regional": ["Block"], "mode": "max-autotune-no-cudagraphs"},
    "sliced-none": False,
    "sliced": {"regional": ["Gather"]},
    "sliced-again": {"regional": ["Gather"]},
}


class GPT(LanguageModel):
    """Its step calls its layers, or itself."""

    def __init__(self, way: str, **options: Any) -> None:
        torch.manual_seed(0)
        small = {"layers": 2, "heads": 4, "width": 16, "context": CONTEXT}
        super().__init__(**small, learning_rate=1e-2, warmup_steps=1, **options)
        self.way, self.losses = way, list[float]()

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        plan = super().parallelize_plan(mesh)
        if self.way in ("parts", "whole"):  # torch cannot compile embeddings sharded over rows
            del plan["bytes"], plan["positions"]
            plan["blocks"] = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            )
        return plan

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.way != "parts":
            loss = super().training_step(batch, batch_idx)
        else:
            x = self.bytes(batch[:, :-1]) + self.positions(torch.arange(CONTEXT))
            logits = self.head(self.norm(self.blocks(x)))
            loss = cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1))
        self.losses.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)
        return DataLoader(list(tokens), batch_size=BATCH)

    val_dataloader = train_dataloader


class Gather(nn.Module):
    """Gathers shards: in backward each rank takes its slice of the gradient."""

    def forward(self, x: Any) -> Tensor:
        full: Tensor = x.redistribute(placements=[Replicate()]).to_local()
        return full * torch.arange(4.0)


class Sliced(Descends):
    """A sharded layer, whose output a compiled module gathers."""

    parallelize_plan: ClassVar = {"layer": ColwiseParallel(use_local_output=False)}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gather, self.losses = nn.Linear(4, 4), Gather(), list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.gather(self.layer(batch)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> Any:
        samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(list(samples), batch_size=BATCH)


def use_backend(name: str) -> None:
    """Compile with another backend than inductor, which needs no C++ compiler and is fast."""
    make = torch.compile

    def compiled(model: Any, **options: Any) -> Any:
        options.pop("mode", None)
        return make(model, backend=name, **options)

    torch.compile = compiled
    compilation.check_compiler = lambda _: None


def train(folder: Path, devices: int, strategy: str, way: str, options: dict[str, Any]) -> Any:
    run = quiet(
        **{
            "global_batch_size": BATCH,
            "max_steps": STEPS,
            "gradient_clip_val": 0.5,
            "default_root_dir": folder,
            "run_name": way,
            "strategy": strategy,
            "devices": devices,
            "compile": WAYS[way],
            **options,
        }
    )
    module: Any = Sliced() if way.startswith("sliced") else GPT(way)
    before = compilation._graphs() if WAYS[way] else 0
    run.fit(module)
    if run.global_rank:
        return None
    return {
        "losses": module.losses,
        "validated": run.metrics.get("val_loss"),
        "weights": [float(weight.double().norm()) for weight in saved(run.run_directory).values()],
        "graphs": compilation._graphs() - before if WAYS[way] else 0,
        "loaded": torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"],
    }


def main(folder: str, devices: str, strategy: str, options: str, backend: str, *ways: str) -> None:
    if backend != "inductor":
        use_backend(backend)
    settings = json.loads(options)
    results = {way: train(Path(folder), int(devices), strategy, way, settings) for way in ways}
    if results[ways[0]] is not None:
        print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
