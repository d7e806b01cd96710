"""Floating-point operations of a sample, as torch counts them for the MFU."""

import csv
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer import launch
from my_project_trainer.loop.flops import flops_per_sample
from torch import Tensor, nn
from torch.utils.data import DataLoader

import manual_subject
from my_project.tasks.language_model import LanguageModel


class Net(trainer.TrainingModule):
    """Two layers of 4 by 4, one of them behind dropout, on samples of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout, self.last = nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.steps = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen += 1
        self.log("loss", 1.0)
        hidden = self.dropout(self.first(batch["x"]))
        loss = self.last(hidden).square().mean() + torch.zeros((), device=self.device)
        return loss * float(torch.rand(()))  # drawn on the host, and not where the count is made

    def train_dataloader(self) -> Any:
        return DataLoader([{"x": torch.full((4,), float(n))} for n in range(8)], batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


# A product of 4 by 4 numbers takes 32 operations. Backward takes one for the gradient of its
# weights, and the second layer one for that of its input.
OPERATIONS = 32.0 * (2 + 2 + 1)


def fit(folder: Path, module: Any = None, **options: Any) -> Any:
    shared = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "max_steps": 4}
    shared |= {"default_root_dir": folder, "run_name": "run", "loggers": ["csv"]}
    made = trainer.Trainer(**{**shared, "log_every_n_steps": 1, **options})
    made.fit(module or Net())
    return made


def mfu_and_rate(folder: Path) -> tuple[float, float]:
    with (folder / "run" / "speed.csv").open(newline="") as file:
        last = {row[2]: float(row[3]) for row in csv.reader(file) if row[0] != "step"}
    return last["speed/mfu"], last["speed/samples_per_second"]


def test_products_of_forward_and_backward_are_counted() -> None:
    module = Net()
    assert flops_per_sample(module, {"x": torch.ones(3, 4)}) == OPERATIONS
    assert (module.steps, module.seen.item(), module.device.type) == (0, 0, "cpu")
    assert all(each.grad is None and not each.is_meta for each in module.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": ["first"]},
        {"strategy": "fsdp", "devices": 2},
        {"strategy": "dp", "devices": 2},
        {"accumulate_grad_batches": 2},
        {"meta_device": True},
    ],
)
def test_the_part_of_the_peak_is_that_of_the_model(tmp_path: Path, options: dict[str, Any]) -> None:
    made: dict[str, Any] = {"peak_flops": 1e6, "max_steps": 2, **options}
    if made.get("strategy") == "fsdp":
        launch.run_in_processes("fork", 2, lambda: str(fit(tmp_path, **made)), {})
    else:
        fit(tmp_path, **made)
    mfu, rate = mfu_and_rate(tmp_path)
    assert mfu == pytest.approx(rate * OPERATIONS / 1e6 / made.get("devices", 1))


def test_the_count_is_printed_and_changes_nothing_that_is_trained(
    tmp_path: Path, capsys: Any
) -> None:
    weights = []
    for name, options in (("with", {"peak_flops": 1e6}), ("without", {})):
        module = Net()
        fit(tmp_path / name, module, enable_progress_bar=True, **options)
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    line = "floating-point operations per sample, counted: 160"
    assert capsys.readouterr().out.splitlines().count(line) == 1


def test_that_of_the_gpt_is_the_formula_s() -> None:
    model = LanguageModel(layers=2, heads=2, width=64, context=24)
    assert model.flops_per_sample is not None
    counted = flops_per_sample(model, torch.randint(256, (3, 25)))
    assert counted == pytest.approx(model.flops_per_sample, rel=0.02)


class Reads(Net):
    """Reads a value, of which there is none on the meta device."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * loss.item()


class Adds(Net):
    """Has no products."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (batch["x"] + self.first.bias).sum()


@pytest.mark.parametrize(
    ("module", "start", "end"),
    [
        (
            Reads(),
            "peak_flops: the operations of Reads.training_step cannot be counted on the meta "
            "device (Tensor.item() cannot be called on meta tensors",
            ": set flops_per_sample of Reads",
        ),
        (
            Adds(),
            "peak_flops: torch counts no operations in Adds.training_step, only those of products "
            "and convolutions",
            ": set flops_per_sample of Adds",
        ),
        (
            manual_subject.ByHand(),
            "peak_flops: the operations of ByHand, which uses manual optimization, cannot be "
            "counted",
            "; set its flops_per_sample",
        ),
    ],
)
def test_what_cannot_be_counted_is_said(tmp_path: Path, module: Any, start: str, end: str) -> None:
    with pytest.raises(trainer.UserError) as caught:
        fit(tmp_path, module, peak_flops=1e6)
    [line] = caught.value.problems
    assert (line[: len(start)], line[-len(end) :]) == (start, end)


def test_a_module_may_say_it_itself(tmp_path: Path, capsys: Any) -> None:
    module = Reads()
    module.flops_per_sample = 7.0
    fit(tmp_path, module, peak_flops=1e6)
    mfu, rate = mfu_and_rate(tmp_path)
    assert mfu == pytest.approx(rate * 7 / 1e6)
    assert "counted" not in capsys.readouterr().out
