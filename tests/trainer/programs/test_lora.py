"""The example of docs/how-to/fine-tuning.md, on a tiny model with random weights: no download."""

import re
import sys
from pathlib import Path

import pytest
import torch
from my_project_trainer.cli import load_module
from safetensors.torch import load_file
from test_coming_from import PACKAGES, with_packages
from tests.project import ROOT, require, succeed

from fitting import saved

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "how-to" / "fine-tuning.md"
DATA = ("--data", "my_project.tasks.text.TextFiles", "--data.context", "32")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def fit(name: str, *options: str) -> dict[str, torch.Tensor]:
    how = ("--trainer.accelerator", "cpu", "--trainer.max_steps", "3", "--trainer.loggers", "[]")
    batch = ("--trainer.global_batch_size", "8", "--trainer.limit_val_batches", "2")
    words = ["-m", "my_project", "fit", "--model", "lora.LoRA", *DATA, *how, *batch, *options]
    words += ["--trainer.run_name", name]
    succeed(words, cwd=Path.cwd(), extra=OFFLINE | with_packages())
    return saved(Path("runs") / name)


def test_adapters_are_trained_under_each_strategy_as_in_one_process(apart, monkeypatch):
    require(None if any(PACKAGES.glob(".ready-*")) else "models are not installed: make models")
    [code] = re.findall(r"```python\n(from typing.*?)```", PAGE.read_text(), re.DOTALL)
    Path("lora.py").write_text(code)
    one = fit("one", "--trainer.devices", "1")
    adapters = {name for name in one if "lora_" in name}
    assert len(adapters) == 8  # two of two projections of two layers
    for strategy in ("ddp", "fsdp"):
        ours = fit(strategy, "--trainer.devices", "2", "--trainer.strategy", strategy)
        for name, value in one.items():
            torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=0)

    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path, str(Path("packages").resolve())])
    module = load_module("runs/one", trust=True)
    module.network.save_pretrained("adapter")
    assert len(load_file("adapter/adapter_model.safetensors")) == len(adapters)
    # The base without adapters, as a pretrained model, and adapters from a run's weights.
    module.network.unload().save_pretrained("base")
    weights = ("--trainer.weights", "runs/one", "--model.learning_rate", "0.01")
    more = fit("more", "--trainer.devices", "1", "--model.pretrained", "base", *weights)
    for name, value in one.items():
        assert torch.equal(more[name], value) is (name not in adapters), name
    del sys.modules["lora"]
