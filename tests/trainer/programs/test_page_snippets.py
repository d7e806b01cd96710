"""Snippets of pages: a plain loop and its module, losses, windows, images, metrics."""

import ast
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.cli import load_weights
from tests.project import ROOT, succeed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fitting import Descends, quiet

pytestmark = pytest.mark.usefixtures("apart")
DOCS = ROOT / "docs"
BESIDE = {"use_distributed_sampler": "false", "accelerator": "cpu", "devices": "1"}
IMPORTS = "import torch\nfrom torch import nn\nfrom torch.utils.data import Dataset\n"


def blocks(page: str, language: str = "python", heading: str = "") -> list[str]:
    text = (DOCS / page).read_text()
    text = text.split(f"\n## {heading}")[1] if heading else text
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def defined(page: str, heading: str) -> dict[str, Any]:
    """What the first snippet of a section defines."""
    known = {cls.__name__: cls for cls in (Dataset, trainer.TrainingModule, trainer.Callback)}
    variables: dict[str, Any] = known | {"torch": torch, "nn": nn, "cross_entropy": cross_entropy}
    exec(blocks(page, heading=heading)[0], variables)  # noqa: S102
    return variables


def fit(module: trainer.TrainingModule, loader: Any, **options: Any) -> trainer.Trainer:
    made = quiet(**{"max_epochs": 1, "use_distributed_sampler": False} | options)
    made.fit(module, *loader)
    return made


def test_a_plain_loop_trains_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module, before = blocks("coming-from/plain-loop.md")
    [config] = blocks("coming-from/plain-loop.md", "yaml")
    assert before.count("\n") > 200 > 75 > module.count("\n") + config.count("\n")
    parts = {node.name: ast.get_source_segment(before, node) for node in ast.parse(before).body
             if isinstance(node, ast.ClassDef | ast.FunctionDef)}  # fmt: skip
    Path("squares.py").write_text(f"{IMPORTS}{parts['Squares']}\n{parts['make_network']}\n")
    Path("my_module.py").write_text(module.replace("shuffle=True", "shuffle=False"))
    Path("squares.yaml").write_text(config)
    Path("before.py").write_text(before.replace("shuffle=True", "shuffle=False"))
    paths = os.pathsep.join([str(Path.cwd()), os.environ["PYTHONPATH"]])
    options = [word for name, value in BESIDE.items() for word in (f"--trainer.{name}", value)]
    words = ["-m", "my_project", "fit", "--config", "squares.yaml", *options]
    succeed([*words, "--trainer.run_name", "one"], cwd=Path.cwd(), extra={"PYTHONPATH": paths})
    monkeypatch.setattr(sys, "argv", ["before.py"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runpy.run_path("before.py", run_name="__main__")
    torch.set_num_threads(threads)
    for file, name in (("last.pt", "last"), ("best.pt", "best")):
        expected = torch.load(Path("output", file), weights_only=True)["model"]
        loaded: Any = trainer.TrainingModule()
        loaded.network = runpy.run_path("squares.py")["make_network"](16)
        load_weights(loaded, Path("runs", "one") if name == "last" else Path("runs", "one", name))
        for key, value in loaded.network.state_dict().items():
            torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=0)


def test_class_weights_are_those_of_the_whole_step() -> None:
    kind = defined("how-to/data.md", "Class weights")["Weighted"]
    x, y = torch.randn(8, 4), torch.tensor([0, 0, 0, 0, 1, 1, 0, 1])
    weights = []
    for size in (8, 4):
        torch.manual_seed(0)
        module = kind()
        loader = DataLoader(TensorDataset(x, y), batch_size=size)
        fit(module, [loader], accumulate_grad_batches=8 // size)
        weights.append(module.layer.weight.detach())
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes)
        return made


def test_a_chunked_loss_is_that_of_all_tokens(tmp_path: Path) -> None:
    head = defined("how-to/memory.md", "Large vocabularies")["ChunkedLoss"](2, 100, tokens=4)
    hidden, labels = torch.randn(3, 5, 2, requires_grad=True), torch.arange(15).view(3, 5)
    labels[0, :2] = -100
    with Largest() as seen:
        loss = head(hidden, labels)
        loss.backward()
    assert seen.elements == 4 * 100
    chunked = [loss, hidden.grad, head.weight.grad]
    hidden.grad = head.weight.grad = None
    full = cross_entropy((hidden @ head.weight.T).flatten(0, 1), labels.flatten())
    full.backward()
    torch.testing.assert_close(chunked, [full, hidden.grad, head.weight.grad], atol=1e-6, rtol=0)


class Plain(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[list[float]] = []
        self.samples = torch.zeros(1, 4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].flatten().tolist())
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.layer(batch[0]).mean())


def test_random_windows_are_others_in_each_epoch_and_the_same_again() -> None:
    kind = defined("how-to/data.md", "Random windows")["Windows"]
    seen = []
    for _ in range(2):
        module = Plain()
        data = kind(torch.arange(1000.0), 4, 8)
        fit(module, [DataLoader(data, batch_size=8)], max_epochs=2, use_distributed_sampler=True)
        seen.append(module.seen)
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]


def test_images_are_in_tensorboard() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kind = defined("how-to/loggers.md", "Images, figures and text")["Samples"]
    batch = [(torch.ones(2, 4),)]
    both = [batch, batch]  # a list of batches is a loader
    made = fit(Plain(), both, callbacks=[kind()], loggers=["csv", "tensorboard"])
    assert made.run_directory is not None
    events = EventAccumulator(str(made.run_directory / "tensorboard")).Reload()
    assert [image.step for image in events.Images("samples")] == [1]


def test_a_metric_is_that_of_all_samples() -> None:
    import torchmetrics

    step = blocks("how-to/metrics.md", heading="torchmetrics")[0]
    variables: dict[str, Any] = {}
    exec(step, variables)  # noqa: S102
    module: Any = type("Own", (Plain,), {"validation_step": variables["validation_step"]})()
    module.forward = lambda x: x[:, 0]
    module.accuracy = torchmetrics.F1Score("binary")
    x = torch.tensor([1.0, 1, 0, 0, 1])[:, None].expand(5, 4)
    y = torch.tensor([1, 0, 1, 0, 1])
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    made = fit(module, [[(x,)], loader], max_epochs=2)  # it is reset
    assert made.metrics["val_accuracy"] == pytest.approx(2 / 3)
