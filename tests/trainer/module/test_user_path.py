"""A user's path, as the docs describe it: their code and commands are taken from the pages."""

import ast
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.cli import command as cli
from safetensors.torch import load_file
from tests.project import ROOT, fit, succeed

import fitting

pytestmark = pytest.mark.usefixtures("apart")
DOCS = ROOT / "docs" / "how-to"
CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 20
  callbacks:
    - mine.PrintRate
    - class_path: EarlyStopping  # no change is an improvement
      init_args: {monitor: val_loss, patience: 2, min_delta: 100}
    - class_path: BestCheckpoint
      init_args: {monitor: val_loss}
  loggers:
    - csv
    - class_path: mine.TextLogger
      init_args: {file: a.txt}
"""


def blocks(page: str, language: str = "") -> list[str]:
    text = (DOCS / page).read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for kind, content in fenced if kind == language]


def classes(*names: str) -> str:
    """A module with classes of pages, and the imports that stand before them."""
    pages = [text for page in ("callbacks.md", "loggers.md") for text in blocks(page, "python")]
    trees = [ast.parse(text) for text in pages if "class " in text]
    kept = [
        ast.unparse(node)
        for tree in trees
        if any(isinstance(node, ast.ClassDef) and node.name in names for node in tree.body)
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.ImportFrom)
    ]
    return "\n".join(kept)


def test_train_with_own_classes_then_test_load_and_export(capsys: Any) -> None:
    Path("mine.py").write_text(classes("PrintRate", "TextLogger"))
    Path("mine.yaml").write_text(CONFIG)
    done = succeed(fit("--config", "mine.yaml", "--trainer.run_name", "RUN"), cwd=Path.cwd())
    expected = [f"epoch {epoch}: step {22 * epoch + 22} of 440" for epoch in range(3)]
    assert re.findall("^epoch .*", done.stdout, re.MULTILINE) == expected
    rows = fitting.rows(Path("runs/RUN"))
    losses = {step: value for step, _, name, value in rows if name == "val_loss"}
    assert list(losses) == [22, 44, 66]
    logged = Path("runs/RUN/a.txt").read_text().splitlines()
    assert sum("'val_loss'" in line for line in logged) == 3
    commands = [shlex.split(line) for text in blocks("inference.md") for line in text.splitlines()]
    assert [words[3] for words in commands] == ["test", "predict", "export", "export"]
    for words in commands:
        assert words[:3] == ["python", "-m", "my_project"]
        on = [] if words[3] == "export" else ["--trainer.accelerator=cpu", "--trainer.devices=1"]
        cli.main([*words[3:], *on])
    best = min(losses, key=lambda step: losses[step])
    tested = json.loads(Path(f"runs/RUN/test-step-{best:08d}.json").read_text())
    assert tested["step"] == best
    assert tested["metrics"]["test_accuracy"] > 0.7
    script, attribute, elsewhere = blocks("inference.md", "python")
    Path("script.py").write_text(script)
    variables = runpy.run_path("script.py")
    Path("elsewhere.py").write_text(
        "import sys\nsys.modules['my_project'] = None\n"
        f"{elsewhere}torch.save(logits.detach(), 'logits.pt')\n"
    )
    done = succeed(["elsewhere.py"], cwd=Path.cwd())
    assert torch.equal(torch.load("logits.pt"), variables["logits"])
    weights = load_file("digits.safetensors")
    assert weights.keys() == variables["module"].state_dict().keys()
    for name, value in variables["module"].state_dict().items():
        assert torch.equal(weights[name], value)
    assert attribute.startswith("self.example_input_array = torch.zeros(")
