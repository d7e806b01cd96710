"""What a run leaves on the user's module: one attribute, and nothing else."""

from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.module.current_run import TrainerState
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fitting import quiet

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Words(trainer.TrainingModule):
    """A dense layer, a sparse embedding, and a layer that is frozen."""

    def __init__(self, sparse: bool, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.words = nn.Embedding(8, 4, sparse=sparse)
        self.frozen, self.layer = nn.Linear(4, 4), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss: Tensor = self.layer(self.frozen(self.words(batch))).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.words.parameters(), *self.layer.parameters()], lr=0.1)

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(8), batch_size=4)  # type: ignore[arg-type]


def _attached(module: nn.Module) -> dict[str, Any]:
    """All that hangs on modules and parameters, by name: attributes, and numbers of hooks."""
    attached: dict[str, Any] = {}
    for name, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            hooks = attribute.endswith(("_hooks", "_hooks_with_kwargs", "_always_called"))
            attached[f"{name}/{attribute}"] = len(value) if hooks and value is not None else None
        attached[f"{name}/class"] = type(submodule)
    for name, parameter in module.named_parameters():
        attached |= {f"{name}/{attribute}": None for attribute in vars(parameter)}
        attached |= {f"{name}/{hook}": len(getattr(parameter, hook) or ()) for hook in _HOOKS}
        attached[f"{name}/trained"] = parameter.requires_grad
    return attached


@pytest.mark.parametrize(
    ("strategy", "sparse", "automatic"),
    [
        ("single_device", True, True),
        ("dp", False, True),
        ("ddp", True, True),
        ("ddp", False, False),
        ("ddp_zero1", False, True),
        pytest.param("ddp_sharded", False, True, marks=pytest.mark.needs("fairscale")),
        pytest.param("ddp_sharded", False, False, marks=pytest.mark.needs("fairscale")),
        pytest.param("deepspeed_stage_2", False, True, marks=pytest.mark.needs("deepspeed")),
    ],
)
def test_a_run_leaves_nothing_on_the_module(tmp_path, strategy, sparse, automatic):
    module = Words(sparse, automatic)
    before = _attached(module)
    training = quiet(strategy=strategy, devices="auto", max_steps=1, default_root_dir=tmp_path)
    training.fit(module)
    assert training.global_step == 1
    assert _attached(module) == before
    assert module.trainer_state == TrainerState()
