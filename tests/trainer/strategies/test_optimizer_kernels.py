"""The kernels of optimizers that GPUs use, forced on the CPU: fits come to the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from tests.conformance.rows import ROUNDING
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet

STEPS, SAVED = 6, 3
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.01),
    "Adagrad": partial(Adagrad, lr=0.1),
}
KINDS = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Model(trainer.TrainingModule):
    def __init__(self, make: Callable[..., Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        return cross_entropy(self.network(x), labels)

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())


def trained(folder: Path, make: Callable[..., Optimizer], **options: Any) -> list[Tensor]:
    """The weights after a fit with scaled and clipped gradients."""
    x = torch.randn(STEPS * 4, 6, generator=torch.Generator().manual_seed(1))
    model = Model(make)
    options |= {"precision": "16-mixed", "gradient_clip_val": 0.1, "max_epochs": 1}
    options |= {"checkpoint_every_n_steps": SAVED, "default_root_dir": folder, "run_name": "run"}
    running = quiet(**options)
    running.fit(model, DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4))
    assert running.global_step == STEPS
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", MAKERS)
def test_a_fit_and_its_resume_come_to_what_a_loop_over_parameters_does(tmp_path, name):
    makers = {kind: partial(MAKERS[name], **options) for kind, options in KINDS.items()}
    weights = {kind: trained(tmp_path / kind, make) for kind, make in makers.items()}
    # Each from a checkpoint that others have saved.
    for saved_by, kind in (("loop", "foreach"), ("loop", "fused"), ("fused", "loop")):
        torch.testing.assert_close(weights[kind], weights["loop"], rtol=1e-5, atol=ROUNDING)
        checkpoint = tmp_path / saved_by / "run" / "checkpoints" / f"step-{SAVED:08d}"
        folder = tmp_path / f"{kind} of {saved_by}"
        resumed = trained(folder, makers[kind], resume=str(checkpoint))
        torch.testing.assert_close(resumed, weights["loop"], rtol=1e-5, atol=ROUNDING)
