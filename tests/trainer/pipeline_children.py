"""Children of ``sequential_module`` for tests of pipelines: what they take and give differs."""

from typing import Any

import torch
from torch import Tensor, nn


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


class Pair(_Layer):
    """Takes and gives a tensor, one that passes through, and whole numbers that do not train."""

    def forward(self, values: Any) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(values, Tensor):
            values = (values, values * 0.5, torch.arange(len(values)))
        x, skip, number = values
        return self.layer(x + 0.1 * skip).tanh(), skip, number + 1


class Several(nn.Sequential):
    """Takes several inputs, and gives a tuple to the next child as several inputs."""

    def forward(self, *inputs: Any) -> Any:
        for child in self:
            outputs = child(*inputs)
            inputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs


class Two(_Layer):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y + self.layer(x).tanh(), x


class Turned(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(1, (4, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    """Gives the outputs of an LSTM, which torch transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


class ChannelsLast(nn.Module):
    """Gives images whose channels are last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        images = x.transpose(1, 2).unsqueeze(3).contiguous(memory_format=torch.channels_last)
        output: Tensor = self.layer(images)
        return output


def body(kind: str, width: int) -> nn.Sequential:
    """Six children."""
    if kind == "transposed":
        rest = (nn.Flatten(), nn.Linear(width, width), nn.Tanh())
        return nn.Sequential(Turned(width), Recurrent(), ChannelsLast(), *rest)
    if kind == "tuples":
        return nn.Sequential(*(Pair(width) for _ in range(6)))
    if kind == "several":
        return Several(*(Two(width) for _ in range(6)))
    layers: list[nn.Module] = [nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)]
    # At the start of a stage, if it is one of three children.
    layers += [nn.ELU(inplace=True), nn.Linear(width, width), nn.Tanh()]
    if kind == "dropout":
        layers[3] = nn.Dropout(0.2)
    if kind == "norm":
        layers[1], layers[3] = nn.BatchNorm1d(2 * width), nn.BatchNorm1d(width)
    if kind == "shared":
        layers[4] = layers[2] = nn.Linear(width, width)
        layers[0] = nn.Linear(width, width)
    return nn.Sequential(*layers)


class Shrinks(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls < 3 else x[1:]


class Decays(nn.Module):
    """Changes a buffer that its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale: Tensor = self.scale.mul_(0.9)
        return self.weight * x * self.scale
