"""Each value of a checkpoint's state.json has another type: a line refuses it, or it loads."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Trainer, TrainingModule, UserError
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from checkpoint_subject import rewrite

FORGED: list[Any] = ["x", None, [[1]], {"x": {"y": 1}}]


class Line(TrainingModule):
    """Two layers, two optimizers and two schedulers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self.last(self.first(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.last(self.first(batch[0])), batch[1]))

    def train_dataloader(self) -> Any:
        x = torch.arange(16.0).view(8, 2) / 16
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.first.parameters(), lr=0.01)
        sgd = torch.optim.SGD(self.last.parameters(), lr=0.01, momentum=0.9)
        return [adam, sgd], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(adam, 1), "interval": "step"},
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd),
                "monitor": "val_loss",
            },
        ]


def fit(root: Path, **options: Any) -> None:
    monitored = {"init_args": {"monitor": "val_loss"}}
    callbacks: list[Any] = [
        {"class_path": "EMA", "init_args": {"decay": 0.9}},
        {"class_path": "BestCheckpoint", **monitored},
        {"class_path": "EarlyStopping", **monitored},
    ]
    Trainer(
        **{"accelerator": "cpu", "devices": 1, "val_every_n_steps": 1, "callbacks": callbacks},
        **{"enable_progress_bar": False, "default_root_dir": root, "log_every_n_steps": 1},
        **options,
    ).fit(Line())


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in it, those of lists and dicts too."""
    yield path
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    *above, last = path
    inner = tree
    for key in above:
        inner = inner[key]
    inner[last] = value
    return tree


@pytest.mark.usefixtures("apart")
def test_a_forged_value_is_refused_in_a_line_or_loads(tmp_path: Path, capsys: Any) -> None:
    fit(tmp_path, max_steps=5, run_name="good")
    good = tmp_path / "good" / "checkpoints" / "step-00000005"
    content = json.loads((good / "state.json").read_text())["content"]
    paths = [path for path in leaves(content) if path]
    assert len(paths) > 140
    raw: list[str] = []
    for path in paths:
        for value in FORGED:
            forged = tmp_path / "forged"
            shutil.rmtree(forged, ignore_errors=True)
            shutil.copytree(good, forged)
            rewrite(forged, lambda content, path=path, value=value: replaced(content, path, value))
            try:
                fit(tmp_path, max_steps=7, run_name="resumed", overwrite=True, resume=str(forged))
            except UserError as error:
                if len(error.problems) != 1 or str(forged) not in error.problems[0]:
                    raw.append(f"{path} = {value}: {error.problems}")
            except Exception as error:
                raw.append(f"{path} = {value}: {type(error).__name__}: {error}"[:300])
    assert raw == [], "\n".join(raw)
