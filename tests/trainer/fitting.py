"""What tests of fits share: a quiet trainer, and what a run has saved and logged.

``python -m fitting FOLDER RUNS`` fits one module after another. A run is a dict of JSON: its
``name``, the class path of a ``module`` with its ``init`` arguments, and options of the trainer.
Each rank writes ``ends-RANK.json``: by name, the error that has ended a fit, or "".
"""

import csv
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.checkpoint import Checkpoint, resolve
from tests.conformance.rows import ROUNDING
from tests.project import succeed
from torch import Tensor


class Descends(trainer.TrainingModule):
    """By plain SGD, or by another: ``class Model(Descends, by=torch.optim.Adam, lr=0.01)``."""

    _by: Any = torch.optim.SGD
    _options: Mapping[str, Any] = {"lr": 0.1}

    def __init_subclass__(cls, by: Any = None, **options: Any) -> None:
        super().__init_subclass__()
        cls._by, cls._options = by or cls._by, options or cls._options

    def configure_optimizers(self) -> Any:
        return self._by(self.parameters(), **self._options)


class StepsByHand(trainer.TrainingModule):
    """Before another base: manual optimization with the loss of that one's step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def draw(module: torch.nn.Module, scale: float = 0.4, seed: int = 1) -> None:
    """The same parameters in every process."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def quiet(**options: Any) -> trainer.Trainer:
    """One that trains in this process; it shows and logs nothing unless it is told to."""
    shared = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "loggers": []}
    return trainer.Trainer(**shared | options)


def fit(module: Any, folder: Path, **options: Any) -> Any:
    """Train in this process; the trainer, whose run is named ``run``."""
    made = quiet(**{"default_root_dir": folder, "run_name": "run"} | options)
    made.fit(module)
    return made


def fits(
    folder: Path, runs: Sequence[Mapping[str, Any]], *, words: Sequence[str] = (), **how: Any
) -> list[dict[str, str]]:
    """Fit one after another in processes: for each rank the errors, by the names of runs.

    ``words``: arguments of Python before ``-m fitting``; ``how`` the command is started.
    """
    succeed([*words, "-m", "fitting", folder, json.dumps(runs)], **how)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("ends-*.json"))]


def saved(run_directory: Any) -> dict[str, Tensor]:
    """The weights in a run's newest checkpoint, or in a checkpoint."""
    model: dict[str, Tensor] = Checkpoint(resolve(run_directory)).state()["model"]
    return model


def rows(run_directory: Any, file: str = "metrics.csv") -> list[tuple[int, int, str, float]]:
    """Step, epoch, name and value of each row of a run's log, or of another of its files."""
    with (run_directory / file).open(newline="") as opened:
        _, *found = csv.reader(opened)
    return [(int(step), int(epoch), name, float(value)) for step, epoch, name, value in found]


def logged(run_directory: Any, name: str = "loss") -> list[float]:
    """All values of a name in a run's log, in order."""
    return [value for _, _, each, value in rows(run_directory) if each == name]


def assert_close(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Two models are the same but for rounding."""
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=ROUNDING, rtol=0, msg=name)


def main(folder: Path, runs: list[dict[str, Any]]) -> None:
    ends: dict[str, str] = {}
    for options in runs:
        name, init = options.pop("name"), options.pop("init", {})
        source, _, kind = options.pop("module").rpartition(".")
        made = quiet(**{"default_root_dir": folder, "run_name": name} | options)
        with made.building():
            module = getattr(importlib.import_module(source), kind)(**init)
        ends[name] = ""
        try:
            made.fit(module)
        except trainer.UserError as error:
            ends[name] = str(error)
        (folder / f"ends-{made.global_rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
