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

Rule = Literal["none", "sqrt", "linear"]
BATCHES = (32, 64, 128, 256, 512, 1024)
RULES: tuple[Rule, ...] = ("none", "sqrt", "linear")
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


def plot(curves: dict[tuple[str, float, Rule], list[float]], batches: Sequence[int]) -> str:
    """One panel per optimizer and warm-up: accuracy by batch size, a line per rule; as SVG."""
    width, height, margin = 300, 170, 42
    colors = dict(zip(RULES, ("#888888", "#e07b00", "#0068b5"), strict=True))
    parts = []
    for index, (optimizer, warmup) in enumerate(itertools.product(RATES, WARMUPS)):
        left, top = index % 2 * width + margin, index // 2 * height + 24
        w, h = width - margin - 14, height - 58
        title = f"{optimizer}, {'with' if warmup else 'without'} warm-up"
        parts.append(f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>')
        for percent in (0, 50, 100):
            y = top + h * (1 - percent / 100)
            parts.append(f'<path d="M{left} {y}h{w}" stroke="#bbbbbb"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{percent} %</text>')
        places = [left + w * number / (len(batches) - 1) for number in range(len(batches))]
        for x, batch in zip(places, batches, strict=True):
            parts.append(f'<text x="{x}" y="{top + h + 15}" text-anchor="middle">{batch}</text>')
        for rule in RULES:
            values = curves[optimizer, warmup, rule]
            points = [
                f"{x:.0f},{top + h * (1 - y):.1f}" for x, y in zip(places, values, strict=True)
            ]
            parts.append(
                f'<polyline points="{" ".join(points)}" fill="none" stroke="{colors[rule]}" '
                'stroke-width="2"/>'
            )
    for number, (rule, color) in enumerate(colors.items()):
        x, y = margin + 110 * number, 2 * height + 14
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{rule}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {2 * height + 26}" '
        'font-family="sans-serif" font-size="11" fill="#777777">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


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
    curves = {
        words: [accuracy(found, [Fit(*words, batch, seed) for seed in seeds]) for batch in batches]
        for words in itertools.product(RATES, WARMUPS, RULES)
    }
    (folder / "study.svg").write_text(plot(curves, batches))
    for (optimizer, warmup, rule), values in curves.items():
        print(f"{optimizer:6} {warmup:4} {rule:7}", *(f"{value:6.3f}" for value in values))
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
