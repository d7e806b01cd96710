"""The MFU, from the floating-point operations of a sample that a module has."""

from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.launch import start
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fitting
import manual_subject


class Net(fitting.Descends, lr=1e-4):
    """Two layers of 4 by 4, one of them behind dropout, on samples of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout, self.last = nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.flops_per_sample = OPERATIONS

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        self.log("loss", 1.0)
        hidden = self.dropout(self.first(batch["x"]))
        loss = self.last(hidden).square().mean() + torch.zeros((), device=self.device)
        return loss * float(torch.rand(()))

    def train_dataloader(self) -> Any:
        return DataLoader([{"x": torch.full((4,), float(n))} for n in range(8)], batch_size=2)


# A product of 4 by 4 numbers takes 32 operations. Backward takes one for the gradient of its
# weights, and the second layer one for that of its input.
OPERATIONS = 32.0 * (2 + 2 + 1)


def fit(folder: Path, module: Any = None, **options: Any) -> Any:
    shown = {"loggers": ["csv"], "log_every_n_steps": 1, "max_steps": 4}
    return fitting.fit(module or Net(), folder, **{**shown, **options})


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
        start.run_in_processes("fork", 2, lambda: str(fit(tmp_path, **made)), {})
    else:
        fit(tmp_path, **made)
    last = {name: value for _, _, name, value in fitting.rows(tmp_path / "run", "speed.csv")}
    operations = last["speed/samples_per_second"] * OPERATIONS
    assert last["speed/mfu"] == pytest.approx(operations / 1e6 / made.get("devices", 1))


@pytest.mark.parametrize("module", [Net(), manual_subject.ByHand()])
def test_a_module_without_them_is_refused(tmp_path: Path, module: Any) -> None:
    module.flops_per_sample = None
    with pytest.raises(trainer.UserError) as caught:
        fit(tmp_path, module, peak_flops=1e6)
    assert caught.value.problems == [
        f"peak_flops: set flops_per_sample of {type(module).__name__}, for example to what "
        "torch.utils.flop_counter counts for a training step on one sample"
    ]
    assert list(tmp_path.iterdir()) == []
