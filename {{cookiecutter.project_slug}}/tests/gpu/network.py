"""A network whose activations are computed again in backward."""

import torch
from torch import Tensor, nn

FEATURES = 8


class Block(nn.Module):
    """BatchNorm, dropout and a buffer that counts; called by keyword."""

    forwards = 0

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 4 * FEATURES)
        self.norm = nn.BatchNorm1d(4 * FEATURES, momentum=momentum)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(4 * FEATURES, FEATURES)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        Block.forwards += 1
        self.calls += 1
        hidden = self.dropout(self.norm(self.first(x))).tanh()
        return x + scale * self.second(hidden)


class Network(nn.Module):
    """Blocks, one of them called twice, and norms of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(momentum=None), Block()])
        self.images = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Tanh())
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.new_ones(1) / 2
        for layer in (*self.layers, self.layers[0]):
            x = layer(x, scale=scale)
        return self.head(self.images(x.view(len(x), 2, -1)).flatten(1))
