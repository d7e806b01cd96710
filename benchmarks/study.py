"""How batch size, epochs and learning rate interact: many short fits, with their plot as SVG.

usage: python benchmarks/study.py FOLDER [--quick]    in a project's environment; `make study`
  --quick   two batch sizes, one seed, one and two processes

Each fit trains the digits for the same number of epochs. The learning rate is chosen for the batch
of 32, and `learning_rate_scaling` changes it for larger ones. A second part trains one of them on
1, 2, 4 and 8 processes with the same global batch.
"""

import csv
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from my_project_trainer import Trainer

from my_project.tasks.digits import Digits
from my_project.tasks.image_classifier import ImageClassifier
from plots import GRAY, Curve, Panel, panels

Rule = Literal["none", "sqrt", "linear"]
BATCHES = (32, 64, 128, 256, 512, 1024)
RULES: dict[Rule, str] = {"none": GRAY, "sqrt": "#e07b00", "linear": "#0068b5"}
WARMUPS = (0.0, 0.25)  # of the steps of a fit
SEEDS = (1, 2, 3)
PROCESSES = (1, 2, 4, 8)
RATES = {"SGD": 0.02, "AdamW": 3e-3}  # for a batch of 32
EPOCHS = 8
SAMPLES = 1347


class Classifier(ImageClassifier):
    """The example's, without dropout and with either optimizer."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(width=8, dropout=0.0)
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=RATES["SGD"], momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=RATES["AdamW"])


class Fit(NamedTuple):
    """What a fit varies."""

    optimizer: str
    warmup: float
    rule: Rule
    batch: int
    seed: int


class Result(NamedTuple):
    """What a fit reaches, in validation."""

    loss: float
    accuracy: float


def train(fit: Fit, **options: Any) -> Result:
    """Train, and return what the last validation logs."""
    steps = EPOCHS * -(-SAMPLES // fit.batch)
    trainer = Trainer(
        accelerator="cpu",
        seed=fit.seed,
        max_epochs=EPOCHS,
        check_val_every_n_epoch=EPOCHS,
        checkpoint_every_n_epochs=EPOCHS,
        global_batch_size=fit.batch,
        learning_rate_scaling=fit.rule,
        reference_batch_size=None if fit.rule == "none" else BATCHES[0],
        learning_rate_warmup_steps=int(fit.warmup * steps),
        nonfinite_loss="ignore",  # a rate that is too high is a result
        sanity_check=0,
        enable_progress_bar=False,
        loggers=(),
        **options,
    )
    trainer.fit(Classifier(fit.optimizer), Digits())
    values = trainer.callback_metrics
    return Result(float(values["val_loss"]), float(values["val_accuracy"]))


def study(batches: Sequence[int], seeds: Sequence[int]) -> Iterator[tuple[Fit, Result]]:
    """All fits in one process, each with its result."""
    for words in itertools.product(RATES, WARMUPS, RULES, batches, seeds):
        fit = Fit(*words)
        if fit == unscaled(fit) or (fit.rule != "none" and fit.batch > BATCHES[0]):
            yield fit, train(fit, devices=1)


def unscaled(fit: Fit) -> Fit:
    """The same fit without a rule, and so without the warm-up to a scaled rate."""
    return fit._replace(rule="none", warmup=0.0)


def accuracy(found: Mapping[Fit, Result], fits: Sequence[Fit]) -> float:
    """The median of fits that differ in their seed."""
    return statistics.median(found.get(fit, found[unscaled(fit)]).accuracy for fit in fits)


def plot(found: Mapping[Fit, Result]) -> str:
    """Print accuracy by batch size; return it as an SVG, a panel per optimizer and warm-up."""
    batches, seeds = ({getattr(fit, name) for fit in found} for name in ("batch", "seed"))
    percent = {part / 100: f"{part} %" for part in (0, 50, 100)}
    shown = []
    for optimizer, warmup in itertools.product(RATES, WARMUPS):
        curves = []
        for rule, color in RULES.items():
            fits = {n: [Fit(optimizer, warmup, rule, n, seed) for seed in seeds] for n in batches}
            points = [(batch, accuracy(found, fits[batch])) for batch in sorted(batches)]
            curves.append(Curve(color, points))
            print(f"{optimizer:6} {warmup:4} {rule:7}", *(f"{value:6.3f}" for _, value in points))
        title = f"{optimizer}, {'with' if warmup else 'without'} warm-up"
        shown.append(Panel(title, "batch size", sorted(batches), percent, curves))
    return panels(shown, {str(rule): color for rule, color in RULES.items()}, columns=2)


def main(folder: Path, quick: bool) -> None:
    """Run the study; write study.csv, study.svg and processes.json."""
    batches, seeds = (BATCHES[::5], SEEDS[:1]) if quick else (BATCHES, SEEDS)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    found: dict[Fit, Result] = {}
    with (folder / "study.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Fit._fields, *Result._fields])
        for fit, result in study(batches, seeds):
            writer.writerow([*fit, *(f"{value:.6g}" for value in result)])
            found[fit] = result
    (folder / "study.svg").write_text(plot(found))
    one = Fit("SGD", 0.25, "linear", 64, 1)
    same = {
        number: train(one, devices=number, strategy="ddp_fork" if number > 1 else "auto").loss
        for number in (PROCESSES[:2] if quick else PROCESSES)
    }
    (folder / "processes.json").write_text(json.dumps(same))
    print("same global batch:", same)


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as runs:
        os.chdir(runs)
        main(target, "--quick" in sys.argv[2:])
