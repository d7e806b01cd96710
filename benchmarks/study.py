"""How batch size, epochs and learning rate interact: many short fits.

usage: python benchmarks/study.py FOLDER [--quick]    in a project's environment; `make study`
  --quick   two batch sizes, one seed, one and two processes

Each fit trains the digits for the same number of epochs. The learning rate is chosen for the batch
of 32, and `learning_rate_scaling` changes it for larger ones. A second part trains one of them on
1, 2, 4 and 8 processes with the same global batch. FOLDER/study.csv has the fits; the table of
docs/study.md is printed.
"""

import csv
import itertools
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
from report import table

Rule = Literal["none", "sqrt", "linear"]
RULES: tuple[Rule, ...] = ("none", "sqrt", "linear")
BATCHES = (32, 64, 128, 256, 512, 1024)
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


def accuracies(results: Mapping[Fit, Result], batches: Sequence[int], seeds: Sequence[int]) -> str:
    """The table of accuracy in percent by batch size, the median of the seeds."""
    rows = []
    for optimizer, warmup, rule in itertools.product(RATES, WARMUPS, RULES):
        if rule == "none" and warmup:
            continue
        row = [optimizer, rule, "yes" if warmup else "no"]
        for batch in batches:
            fits = [Fit(optimizer, warmup, rule, batch, seed) for seed in seeds]
            reached = [results.get(fit, results[unscaled(fit)]).accuracy for fit in fits]
            row.append(f"{100 * statistics.median(reached):.1f}")
        rows.append(row)
    return table(["optimizer", "rule", "warm-up", *map(str, batches)], rows)


def main(folder: Path, quick: bool) -> None:
    """Run the study; write study.csv, and print the table and losses by number of processes."""
    batches, seeds = (BATCHES[::5], SEEDS[:1]) if quick else (BATCHES, SEEDS)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results: dict[Fit, Result] = {}
    with (folder / "study.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Fit._fields, *Result._fields])
        for fit, result in study(batches, seeds):
            writer.writerow([*fit, *(f"{value:.6g}" for value in result)])
            results[fit] = result
    print(accuracies(results, batches, seeds))
    fit = Fit("SGD", 0.25, "linear", 64, 1)
    for number in PROCESSES[:2] if quick else PROCESSES:
        loss = train(fit, devices=number, strategy="ddp_fork" if number > 1 else "auto").loss
        print(f"{number} processes, the same global batch: loss {loss:.7f}")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as runs:
        os.chdir(runs)
        main(target, "--quick" in sys.argv[2:])
