"""A loader that can be read only once is refused before a fit, and used by an evaluation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_user_code import Model, data, line_of, make
from torch.utils.data import DataLoader

MADE: list[Callable[[], Any]] = [
    lambda: (batch for batch in DataLoader(data(), batch_size=2)),
    lambda: iter(DataLoader(data(), batch_size=2)),
    lambda: map(list, [[torch.ones(2, 1)]] * 3),
]


class Again:
    def __iter__(self) -> "Again":
        self.left = 3
        return self

    def __next__(self) -> list[torch.Tensor]:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return [torch.ones(2, 1)]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("stage", ["train", "val", "given", "given val"])
def test_a_fit_refuses_it(tmp_path: Any, made: Callable[[], Any], stage: str) -> None:
    module, told = Model(validation_step=print), f"a {type(made()).__name__}, which can be read"
    if stage.startswith("given"):
        loaders = [made()] if stage == "given" else [DataLoader(data()), made()]
        line = line_of(tmp_path, module, *loaders, max_epochs=2)
        assert line.startswith(f"the trainer was given {told}")
    else:
        setattr(module, f"{stage}_dataloader", made)
        line = line_of(tmp_path, module, max_epochs=2)
        assert line.startswith(f"Model.{stage}_dataloader returned {told}")
    assert not list(tmp_path.glob("*/checkpoints"))


def test_one_that_begins_again_trains_each_epoch(tmp_path: Any) -> None:
    run = make(tmp_path, max_epochs=2)
    run.fit(Model(), Again())
    assert run.global_step == 6


@pytest.mark.parametrize("made", MADE)
def test_an_evaluation_reads_it(tmp_path: Any, made: Callable[[], Any]) -> None:
    seen: list[int] = []
    make(tmp_path).test(Model(test_step=lambda batch, batch_idx: seen.append(batch_idx)), made())
    assert len(seen) == len(list(made()))
