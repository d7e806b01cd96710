"""Gradients are clipped as torch's own functions clip them, in one process."""

from typing import Any

import pytest
import torch
from tests.conformance.rows import ROUNDING
from torch import Tensor, nn

from fitting import Descends, quiet

BATCHES = [torch.tensor([[1.0, 20.0, -3.0]]) * scale for scale in (1.0, -2.0, 0.01, 5.0)]


class Line(Descends, lr=0.1, momentum=0.5):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch @ self.weight).sum()


CLIPS = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_weights_are_those_of_a_plain_loop(tmp_path, algorithm, accumulate):
    clip: dict[str, Any] = {}
    if algorithm is not None:
        clip = {"gradient_clip_val": 0.7, "gradient_clip_algorithm": algorithm}
    module = Line()
    shared = {"max_epochs": 1, "default_root_dir": tmp_path, "accumulate_grad_batches": accumulate}
    quiet(**shared, **clip).fit(module, BATCHES)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    for index, batch in enumerate(BATCHES, start=1):
        ((batch @ weight).sum() / accumulate).backward()
        if index % accumulate == 0:
            if algorithm is not None:
                CLIPS[algorithm]([weight], 0.7)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(module.weight, weight, rtol=ROUNDING, atol=0)
