"""`make lint typecheck` of a project accept ordinary research code, and find its errors."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.project import ROOT

ORDINARY = """
import os, sys
import torch.nn.functional as F
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing import List, Optional

from my_project_trainer import DataModule, TrainingModule


class Net(TrainingModule):
    def __init__(self, width: int = 32, path: str = None, layers=[32, 16]):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        self.best = None
        if path and os.path.exists(path):
            self.load_state_dict(torch.load(open(path, 'rb'), weights_only=True))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert len(x) == len(y), "different lengths"
        act = lambda t: F.relu(t)
        for l, p in zip(["weight", "bias"], self.parameters()):
            print(l, p.shape)
        loss = F.mse_loss(act(self(x)), y)
        print(f"a training step of the network, whose loss goes to the log and, rounded to four digits, here too")
        self.best = loss.item() if self.best is None else min(self.best, loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Data(DataModule):
    def train_dataloader(self):
        unused = 1
        return DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)


def rows(path: str, limit: Optional[int] = None) -> List[int]:
    return [int(line) for line in open(path)][:limit]
"""  # noqa: E501
WRONG = """
def rows(path: str, limit: int) -> list[int]:
    return [path] * limit

rows("a", "b")
print(undefined)
"""
# Added to a file of the trainer, which stays strict.
STRICT = """

def untyped(x):
    assert x
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("research")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    package = folder / "src" / "my_project"
    (package / "tasks" / "ordinary.py").write_text(ORDINARY)
    (package / "tasks" / "wrong.py").write_text(WRONG)
    with (package.with_name("my_project_trainer") / "errors.py").open("a") as file:
        file.write(STRICT)
    return folder


def complaints(project: Path, *command: str) -> set[tuple[str, str]]:
    """Return the files with complaints, each with the rule."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=project, capture_output=True, text=True, timeout=600
    )
    pattern = r"^src/my_project(?:/|_)(\S+?):\d.*?(?: ([A-Z]\d+) .*|\[([\w-]+)\])$"
    lines = re.findall(pattern, done.stdout, re.MULTILINE)
    assert done.returncode == 1, done.stdout + done.stderr
    return {(file, rule or code) for file, rule, code in lines}


def test_lint_finds_errors_and_the_trainers_style(project: Path) -> None:
    assert complaints(project, "ruff", "check", "--no-cache", "--output-format=concise", ".") == {
        ("tasks/wrong.py", "F821"),
        ("trainer/errors.py", "S101"),
    }


@pytest.mark.slow
def test_typecheck_finds_wrong_types_and_the_trainers_missing_ones(project: Path) -> None:
    assert complaints(project, "mypy", "--cache-dir=/dev/null") == {
        ("tasks/wrong.py", "list-item"),
        ("tasks/wrong.py", "arg-type"),
        ("tasks/wrong.py", "name-defined"),
        ("trainer/errors.py", "no-untyped-def"),
    }
