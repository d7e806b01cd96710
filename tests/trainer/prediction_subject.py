"""Predictions of every kind, in one process and on two ranks."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from my_project_trainer import TrainingModule, UserError
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet

SAMPLES, BATCH = 9, 2  # five batches: the first rank has three of them


class Box(NamedTuple):
    at: Tensor
    label: str


@dataclass(frozen=True)
class Answer:
    text: list[str]
    score: Any


class Nested(TrainingModule):
    """Each batch has its width, and one prediction of each type."""

    def __init__(self, kind: str = "nested") -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.weight = torch.nn.Parameter(torch.ones(1))

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(float(SAMPLES))), batch_size=BATCH)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        (x,) = batch
        first = int(x[0])
        if self.kind == "set":
            assert self.calls == 1, "computed more than one batch"
            return {"labels": {first}}
        if self.kind == "scalar":
            return (x * self.weight).sum()
        if self.kind == "rows":
            return x * self.weight
        if self.kind == "table":
            names = [f"«{int(number)}»" + ", 7" * (number == 7) for number in x]
            return {"name": names, "value": x * self.weight, "near": x < 3}
        ragged = x[:, None].expand(-1, 1 + first % 3) * self.weight
        return OrderedDict(
            ragged=ragged,
            boxes=[Box(number, f"«{int(number)}»") for number in x],
            answer=Answer([str(first)], np.float32(first / 3)),
            array=x.numpy() * 2,
            flags=(first % 4 == 0, None, torch.zeros(0, 3), ragged.bfloat16(), first == x),
            by_number={first: x.sum(), "1": float("inf"), (1, 2): 2**70},
        )


def plain(value: Any) -> Any:
    """A value as text, with its types."""
    if isinstance(value, Tensor | np.ndarray):
        return [type(value).__name__, str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return [type(value).__name__, [[plain(key), plain(child)] for key, child in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [plain(element) for element in value]]
    if isinstance(value, Answer):
        return ["Answer", plain(value.text), float(value.score)]
    return value


def predicted(kind: str, devices: int) -> Any:
    """Predictions on so many ranks, or the error."""
    strategy = "single_device" if devices == 1 else "ddp_fork"
    try:
        return plain(quiet(devices=devices, strategy=strategy).predict(Nested(kind)))
    except UserError as error:
        return str(error)


if __name__ == "__main__":
    ranks = {kind: predicted(kind, 2) for kind in ("nested", "scalar", "rows", "set")}
    alone = {kind: predicted(kind, 1) for kind in ("nested", "scalar", "rows")}
    print(json.dumps([alone, ranks]))
