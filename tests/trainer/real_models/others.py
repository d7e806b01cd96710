"""Graphs of PyG, and two models with manual optimization."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch_geometric import nn as graphs
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from .base import GLOBAL_BATCH, Base, Manual, network


class GCN(Base):
    """A classifier of graphs of several sizes, on PyG's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = graphs.GCN(in_channels=5, hidden_channels=16, num_layers=2, out_channels=16)
        self.head = nn.Linear(16, 3)

    def sample(self, generator: torch.Generator) -> Any:
        nodes = int(torch.randint(4, 8, (), generator=generator))
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        label = torch.randint(3, (1,), generator=generator)
        return Data(x=torch.randn(nodes, 5, generator=generator), edge_index=edges, y=label)

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples(), batch_size=GLOBAL_BATCH)

    def loss(self, batch: Any) -> Tensor:
        nodes = self.model(batch.x, batch.edge_index)
        return cross_entropy(self.head(graphs.global_mean_pool(nodes, batch.batch)), batch.y)


class WGAN(Manual):
    """With gradient penalty (https://arxiv.org/abs/1704.00028)."""

    rate = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = network(4, 6), network(6, 1)

    def sample(self, generator: torch.Generator) -> Any:
        real, noise = (torch.randn(size, generator=generator) for size in (6, 4))
        return real + 1, noise, torch.rand(1, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise, share = batch
        generator, critic = self.optimizers()
        fake = self.generator(noise)
        with critic.toggle_model():
            loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
            loss = loss + 10 * self.penalty(share * real + (1 - share) * fake.detach())
            self.manual_backward(loss)
            critic.step()
            critic.zero_grad()
        with generator.toggle_model():
            self.manual_backward(-self.critic(fake).mean())
            generator.step()
            generator.zero_grad()
        self.log("loss", loss)

    def penalty(self, between: Tensor) -> Tensor:
        """How far the norm of the critic's gradient is from 1."""
        between.requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return ((gradient.norm(dim=1) - 1) ** 2).mean()


class ActorCritic(Manual):
    """On a corridor of six cells, of which the last gives a reward and ends an episode."""

    CELLS = 6
    rate = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(self.CELLS, 2), network(self.CELLS, 1)

    def sample(self, generator: torch.Generator) -> Any:
        """A cell, and the random number that chooses an action there."""
        cell = int(torch.randint(self.CELLS - 1, (), generator=generator))
        return cell, float(torch.rand((), generator=generator))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        cell, chance = batch
        now = one_hot(cell, self.CELLS).float()
        choices = self.actor(now).log_softmax(dim=1)
        right = (chance < choices[:, 1].exp()).long()
        then = (cell + 2 * right - 1).clamp(min=0)
        reward = (then == self.CELLS - 1).float()
        value = self.critic(now)[:, 0]
        with torch.no_grad():
            following = self.critic(one_hot(then, self.CELLS).float())[:, 0]
        target = reward + 0.9 * following * (1 - reward)
        chosen = choices.gather(1, right[:, None])[:, 0]
        losses = [-(chosen * (target - value.detach())).mean(), mse_loss(value, target)]
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            with optimizer.toggle_model():
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        self.log("loss", losses[1])
