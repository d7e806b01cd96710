"""In mixed precision, layers of fsdp and of meshes compute in half precision, the rest in float32.

test_storages.py counts the weights that wait for the backward.
"""

from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.strategies.fsdp import fsdp
from tests.conformance.rows import rounding
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fitting import Descends, quiet


class Norms(nn.Module):
    """Makes a float32 tensor between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(x + torch.ones(8))


class Holder(Descends, by=torch.optim.AdamW, lr=1e-3, foreach=True):
    """A model of layers in half precision; ``mixes``: and an operation of both data types."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.mixes, self.seen = Norms(), mixes, set[torch.dtype]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        y = batch @ self.model.first.weight.T if self.mixes else self.model(batch)
        self.seen.add(y.dtype)
        return y.square().mean()


def fit(module: trainer.TrainingModule, strategy: str = "fsdp") -> None:
    made = quiet(max_epochs=1, strategy=strategy, precision="bf16-mixed")
    made.fit(module, [torch.ones(4, 6)] * 2)


@pytest.mark.parametrize("strategy", ["fsdp", "mesh"])
def test_layers_compute_in_half_precision_and_the_loss_in_float32(apart, monkeypatch, strategy):
    module, seen, policies = Holder(mixes=False), [], []

    def note(layer: nn.Module, args: Any, y: torch.Tensor) -> None:
        seen.append((args[0].dtype, layer.weight.dtype, y.dtype))

    def make(*dtypes: Any, **options: Any) -> MixedPrecisionPolicy:
        policies.append(dtypes)
        return MixedPrecisionPolicy(*dtypes, **options)

    monkeypatch.setattr(fsdp, "MixedPrecisionPolicy", make)
    for layer in (module.model.first, module.model.norm, module.model.last):
        layer.register_forward_hook(note)
    fit(module, strategy)
    half = (torch.bfloat16,) * 3
    norm = (torch.bfloat16, torch.float32, torch.bfloat16)
    assert seen == [half, norm, half] * 2
    assert module.seen == {torch.float32}
    # Gradients are reduced in float32.
    assert {policy for policy in policies if policy[0]} == {(torch.bfloat16, torch.float32)}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_an_operation_of_two_data_types_is_explained(apart):
    line = r"mixes float32 and half precision \(test_sharded_precision.py, line \d+\).*cast the"
    with pytest.raises(trainer.UserError, match=line):
        fit(Holder(mixes=True))


class Recurrent(nn.Module):
    """Keeps its weights in a list, too; its last layer has a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.GRU(6, 8, batch_first=True), nn.Parameter(torch.ones(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, None].repeat(1, 3, 1))[0][:, -1] @ self.weight


class Attention(nn.Module):
    """Float32 masks, a buffer, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.tokens.weight
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.register_buffer("places", torch.arange(48.0).view(6, 8) / 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        y = self.layer(self.tokens(x.long()) + self.places, src_mask=mask)
        return self.head(y.float()).softmax(-1)


class Images(nn.Sequential):
    """Convolutions with norms, two of which keep running statistics."""

    def __init__(self) -> None:
        norm = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        convolutions = nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ConvTranspose1d(8, 8, 3), norm
        super().__init__(nn.Unflatten(1, (1, 6)), *convolutions, nn.GroupNorm(2, 8), nn.Flatten())


class Wrapped(Descends):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses = kind(), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch * torch.linspace(0, 1, 24).view(4, 6)
        loss = (self.model(x).float() - 0.5).square().mean()
        self.losses.append(float(loss.detach()))
        return loss


@pytest.mark.parametrize("kind", [Recurrent, Attention, Images])
def test_models_that_mix_data_types_train_as_under_autocast(apart, kind):
    sharded, alone = Wrapped(kind), Wrapped(kind)
    fit(sharded)
    fit(alone, "single_device")
    # Each of about ten operations rounds to 2^-9 of its result.
    assert sharded.losses == pytest.approx(alone.losses, rel=rounding(10, 1.0, torch.bfloat16))
