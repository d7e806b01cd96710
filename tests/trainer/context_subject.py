"""Trains, tests and predicts with a GPT under a strategy; started by test_context.py.

``python -m context_subject FOLDER HOW CASES SAVED`` writes, for each case, what was logged and
predicted; checkpoints have the weights. SAVED is the folder of the first halves of other runs.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import my_project_trainer as trainer
import torch
from my_project_trainer import sequence
from tests.conformance.rows import ROUNDING
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from my_project.tasks.language_model import LanguageModel
from my_project.tasks.text import ByteSequences

SAMPLES, STEPS = 12, 4


class Case(NamedTuple):
    """A model and its training; ``tolerance``: largest difference of a weight or a value."""

    length: int = 32
    ignored: bool = False
    dropout: float = 0.0
    tolerance: float = ROUNDING
    options: Mapping[str, Any] = MappingProxyType({})


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
CASES = {
    "divisible": Case(),
    "not-divisible": Case(33, options=ACCUMULATED),
    "ignored": Case(33, True, options={"activation_checkpointing": ["Block"]}),
    "bf16": Case(33, True, tolerance=2e-3, options={"precision": "bf16-mixed"}),
    "dropout": Case(33, dropout=0.2, options=ACCUMULATED),  # each process draws its own
}


class Model(LanguageModel):
    """A GPT under SGD, which shows the scale of gradients; it may ignore most of its targets."""

    def __init__(self, case: Case) -> None:
        super().__init__(2, 2, 16, case.length, case.dropout)
        self.case = case

    def _loss(self, batch: Tensor) -> Tensor:
        if not self.case.ignored:
            return super()._loss(batch)
        # All of the first slices, and some of the others.
        targets = batch[:, 1:].masked_fill(batch[:, 1:] % 3 == 0, -100)
        targets[:, : self.case.length * 2 // 3] = -100
        targets = sequence.split(targets, 1)
        losses = cross_entropy(self(batch[:, :-1]).transpose(1, 2), targets, reduction="none")
        return sequence.mean(losses, (targets != -100).sum())

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        if self.case.length % (mesh.context * mesh.tensor) == 0:
            return super().parallelize_plan(mesh)
        # The GPT's own plan shards a slice over the tensor group.
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader[Tensor]:
        count = SAMPLES * self.case.length + 1
        draw = torch.Generator().manual_seed(0)
        data = torch.randint(16, (count,), generator=draw, dtype=torch.uint8).cumsum(0) % 97
        return DataLoader(ByteSequences(data, self.case.length), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def train(case: Case, folder: Path, how: dict[str, Any], **options: Any) -> Any:
    """A trainer that has trained."""
    run = trainer.Trainer(
        **{
            "accelerator": "cpu",
            "global_batch_size": 4,
            "max_steps": STEPS,
            "loggers": [],
            "enable_progress_bar": False,
            "default_root_dir": folder,
            **how,
            **case.options,
            **options,
        }
    )
    run.fit(Model(case))
    return run


def main(folder: Path, how: dict[str, Any], names: list[str], saved: Path) -> None:
    """Run cases; each also stops in the middle, and is resumed from there and from SAVED."""
    for name in names:
        case, half = CASES[name], f"{name}-half"
        run = train(case, folder, how, run_name=name)
        found = {"fit": dict(run.metrics), "test": run.test(Model(case), checkpoint=folder / name)}
        predicted = run.predict(Model(case), checkpoint=folder / name)
        found["predicted"] = torch.cat(predicted).tolist()
        train(case, folder, how, run_name=half, max_steps=STEPS // 2)
        train(case, folder, how, run_name=f"{name}-resumed", resume=str(folder / half))
        train(case, folder, how, run_name=f"{name}-ported", resume=str(saved / half))
        if run.global_rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[-1]))
