"""What test_pairs.py trains, and asks the trainer about.

``python -m pairs_subject array FOLDER`` writes ``array.json`` there: the rows, and what is refused.
``… train FOLDER NAME`` trains what ``NAME.json`` lists, one after another, each into a folder.
"""

import itertools
import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import my_project_trainer as trainer
import torch
from my_project_trainer import callbacks
from my_project_trainer.errors import Problems
from my_project_trainer.loop.position import scaled_rate
from my_project_trainer.memory import meta_device
from my_project_trainer.options import Options
from my_project_trainer.run import plan
from my_project_trainer.run.rank import RankRun
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from compile_subject import use_backend
from pairs import Array, all_pairs
from pairs_factors import FACTORS, SIZES, keywords

SAMPLES = 101  # the last batch of an epoch is uneven on any number of processes
VALIDATED = 31
BATCH = 6
UNEVEN = (6, 4)
"""Batches of each replica where the trainer reads loaders as they are."""
WIDTH, NOISE = 16, 0.1


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise, drawn at each read; one sample has infinite targets."""

    def __init__(self, size: int, scale: float, poisoned: bool, noise: float) -> None:
        self.noise = noise
        self.x = torch.randn(size, 6, generator=torch.Generator().manual_seed(2))
        self.y = torch.stack([self.x.sum(1), self.x.prod(1), self.x[:, 0] * self.x[:, 1]], 1)
        self.y *= scale
        if poisoned:
            self.y[30] = torch.inf

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.noise * torch.randn(6), self.y[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Subject(trainer.TrainingModule):
    """A regression that is as the options of its trainer need it.

    ``pieces``: compute in one process what so many replicas read as it is; ``norm``: normalize
    batches, also if it is one process that does.
    """

    flops_per_sample = 1000.0

    def __init__(self, options: Mapping[str, Any], pieces: int = 0, norm: bool = False) -> None:
        super().__init__()
        # Small enough that no scaled gradient overflows: a part of a batch may have a larger mean
        # gradient than the whole, and so would skip other steps.
        self.scale = 0.1 if options["precision"] == "16-mixed" else 1.0
        self.poisoned = options["nonfinite_loss"] == "skip"
        self.uneven = options["uneven_inputs"] == "join"
        self.as_it_is = not options["use_distributed_sampler"]
        self.pieces = pieces
        normalize = nn.BatchNorm1d(WIDTH) if norm or options["sync_batchnorm"] else nn.Identity()
        layers = [nn.Linear(6, WIDTH), Block(), normalize, Block(), nn.Linear(WIDTH, 3)]
        self.sequential_module = nn.Sequential(*layers)
        torch.manual_seed(options["seed"])
        for name, layer in self.named_modules():
            parameters = [*layer.parameters(recurse=False)]
            if parameters and not parameters[0].is_meta:
                self.initialize(name, layer)

    def initialize(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            for parameter in (layer.weight, layer.bias):
                nn.init.normal_(parameter, std=0.4 * self.scale)
        else:
            layer.reset_parameters()

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        return {
            "sequential_module.3.linear": ColwiseParallel(),
            "sequential_module.4": RowwiseParallel(),
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.sequential_module(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", mse_loss(self.sequential_module(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        schedule = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self) -> Any:
        samples = Samples(SAMPLES, self.scale, self.poisoned, NOISE)
        if not self.as_it_is:
            return DataLoader(samples, batch_size=BATCH, shuffle=True)
        facts = self.trainer
        replicas = self.pieces or facts.data_replicas
        mine = range(replicas) if self.pieces else [facts.data_index]
        steps = [UNEVEN[replica % 2] if self.uneven else UNEVEN[0] for replica in range(replicas)]
        batches = []
        for step in range(max(steps[replica] for replica in mine)):
            starts = [(replica * 7 + step) * BATCH for replica in mine if step < steps[replica]]
            indices = [index for start in starts for index in range(start, start + BATCH)]
            batches.append((samples.x[indices], samples.y[indices]))
        return batches

    def val_dataloader(self) -> Any:
        # Only of samples in the trainer's order, each has its own seed.
        noise = 0.0 if self.as_it_is else NOISE
        return DataLoader(Samples(VALIDATED, self.scale, False, noise), batch_size=8)


def refusals(options: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Ask the trainer why it refuses a run: by which check, and in which lines.

    The first two are before any process is started, and the third when a rank has its loaders.
    """
    check = 0
    try:
        planned = plan.make(Options(**options), Problems())
        check = 1
        module = _module(**{name: options[name] for name in SHAPING})
        plan.check_module(planned, module)
        check = 2
        _read_loaders(planned, module)
    except trainer.UserError as error:
        return check, list(error.problems)
    return 3, []


# The options that a subject is made by.
SHAPING = (
    *("precision", "nonfinite_loss", "uneven_inputs", "use_distributed_sampler", "sync_batchnorm"),
    *("seed", "meta_device"),
)


@cache
def _module(**options: Any) -> Subject:
    with meta_device.building() if options["meta_device"] else nullcontext():
        return Subject(options)


class _Rank(RankRun):
    """One that reads its loaders without having joined the others."""

    def _data_replica(self) -> tuple[int, int]:
        return self.strategy.replicas(len(self.plan.node_devices), 1), 0


def _read_loaders(made: plan.Plan, module: Subject) -> None:
    """What each rank checks when it has its loaders."""
    rank = _Rank(made, None, False)
    module.trainer_state = replace(module.trainer_state, run=rank)
    rank._module = module
    feed = rank.training_feed(module.train_dataloader())
    size = feed.samples_per_step  # each option that needs it is refused when the loop is made
    if size is None and made.options.peak_flops is not None:
        raise trainer.UserError("peak_flops: the loader has no batch_size; leave peak_flops out")
    shares = rank.data_replicas * feed.accumulate
    scaled_rate(made.options, size, None if size is None else size // shares)
    plan.check_loaders(made, validates=bool(made.options.limit_val_batches), orders=feed.has_plan)


# What horovodrun tells a process.
LAUNCHED = {
    **{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"},
    **{"HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"},
    **{"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"},
}


def make_array(folder: Path) -> Array:
    """Rows that hold all pairs of values that the trainer takes together."""

    @cache
    def asked(row: tuple[tuple[str, int], ...]) -> tuple[int, list[str]]:
        options = {**keywords(dict(row), folder), "enable_progress_bar": False}
        named = [(entry["class_path"], entry["init_args"]) for entry in options["callbacks"]]
        options["callbacks"] = [getattr(callbacks, name)(**arguments) for name, arguments in named]
        with mock.patch.dict(os.environ, LAUNCHED if options["strategy"] == "horovod" else {}):
            return refusals(options)

    array = Array(SIZES, lambda row: asked(tuple(sorted(row.items()))))
    array.complete(all_pairs(SIZES))
    return array


def write_weights(folder: Path) -> None:
    """Weights to start from, whole and in part, with a BatchNorm and without, and small ones."""
    defaults = {name: values[0] for name, values in FACTORS.items()}
    for norm, precision in itertools.product((False, True), ("32-true", "16-mixed")):
        options = {"sync_batchnorm": norm, "precision": precision, "seed": 3}
        weights = Subject({**defaults, **options}).state_dict()
        kind = "small-" * (precision == "16-mixed") + "norm-" * norm
        save_file(weights, folder / f"{kind}weights.safetensors")
        del weights["sequential_module.4.bias"]
        save_file(weights, folder / f"{kind}part-weights.safetensors")


def train(folder: Path, name: str, options: Mapping[str, Any], **subject: Any) -> int:
    """Train; the main process writes how it ended. Gives the number of steps."""
    torch._dynamo.reset()
    directory = folder / name.partition("-")[0]
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    try:
        run = trainer.Trainer(**options, default_root_dir=directory, run_name=name)
        with run.building():
            module = Subject(options, **subject)
        run.fit(module)
    except trainer.UserError as error:
        result: dict[str, Any] = {"refused": list(error.problems)}
        run = None
    else:
        result = {"step": run.global_step, "metrics": dict(run.metrics)}
    if run is None or run.global_rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(result))
    return result.get("step", 0)


def train_all(folder: Path, requests: list[dict[str, Any]]) -> None:
    """Train one after another; a run with the name of another is stopped in its middle."""
    steps: dict[str, int] = {}
    for request in requests:
        options = request["options"]
        if (of := request.pop("half_of", None)) is not None:
            # Not from a file: the main rank may not have written it yet.
            done = steps.get(of) or json.loads((folder / f"{of}.json").read_text()).get("step", 0)
            if not done:
                continue
            options["max_steps"] = max(1, (done - 1) // 2)
        steps[request["name"]] = train(folder, **request)


def main(command: str, folder: Path, *names: str) -> None:
    use_backend("aot_eager")
    if command == "array":
        write_weights(folder)
        array = make_array(folder)
        refused = [[sorted(atoms), line] for atoms, line in array.refused.items()]
        (folder / "array.json").write_text(json.dumps({"rows": array.rows, "refused": refused}))
    else:
        train_all(folder, json.loads((folder / f"{names[0]}.json").read_text()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
