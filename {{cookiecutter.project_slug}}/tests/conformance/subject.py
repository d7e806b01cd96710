"""What every strategy trains here: small networks on made-up data, one variation a property."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import my_project_trainer as trainer

SAMPLES = 101  # divides by nothing: the last batch of an epoch is uneven on any number of processes
GLOBAL_BATCH = 24
# Batches of each reader where they are uneven, from the first reader on.
UNEVEN_BATCHES = (5, 3, 4, 2)
UNEVEN_BATCH = 6


class NormInPieces(nn.BatchNorm1d):
    """What replicas compute that each normalize by their own piece of a batch.

    The running statistics are those of the first piece, as replica 0's are kept.
    """

    def __init__(self, features: int, pieces: int) -> None:
        super().__init__(features)
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        first, *others = x.chunk(self.pieces)
        outputs = [super().forward(first)]
        for piece in others:
            outputs.append(
                nn.functional.batch_norm(piece, None, None, self.weight, self.bias, training=True)
            )
        return torch.cat(outputs)


class Base(trainer.TrainingModule):
    """Data and parameters are the same in every process.

    Args:
        pieces: into how many the strategy that is compared cuts a batch.
        readers: among how many.
        in_pieces: compute in one process what so many pieces, or readers, would.
        uneven: give each reader another number of batches.
        drop_last: leave out the uneven batch.
        scale: of weights and targets.
    """

    def __init__(
        self,
        pieces: int = 1,
        readers: int = 1,
        in_pieces: bool = False,
        uneven: bool = False,
        drop_last: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.pieces, self.readers = (pieces, readers) if in_pieces else (1, 1)
        self.uneven, self.drop_last, self.scale = uneven, drop_last, scale

    def start(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4 * self.scale

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        """The last two linear layers of each network, by columns and by rows."""
        plan: dict[str, Any] = {}
        for name, network in self.named_modules():
            if isinstance(network, nn.Sequential):
                linear = [i for i, layer in enumerate(network) if isinstance(layer, nn.Linear)]
                plan[f"{name}.{linear[-2]}"] = ColwiseParallel()
                plan[f"{name}.{linear[-1]}"] = RowwiseParallel()
        return plan

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(SAMPLES, 6, generator=generator)
        y = torch.stack([x.sum(1), x.prod(1), x[:, 0] * x[:, 1]], dim=1)
        if self.uneven:
            return self.uneven_batches(x, y)
        return DataLoader(TensorDataset(x, y * self.scale), batch_size=8, drop_last=self.drop_last)

    def uneven_batches(self, x: Tensor, y: Tensor) -> list[Any]:
        """This reader's batches; or, in pieces, what all readers see in each step."""
        readers = range(self.readers) if self.readers > 1 else [self.global_rank]
        steps = UNEVEN_BATCHES[readers[0]]
        batches = []
        for step in range(steps):
            parts = [
                slice(start := (reader * 5 + step) * UNEVEN_BATCH % 90, start + UNEVEN_BATCH)
                for reader in readers
                if step < UNEVEN_BATCHES[reader]
            ]
            batches.append((torch.cat([x[p] for p in parts]), torch.cat([y[p] for p in parts])))
        return batches


class Regression(Base):
    """Two hidden layers.

    Args:
        optimizer: ``"sgd"``, ``"adam"``, or ``"two"`` (SGD for one half, Adam for the other).
        schedule: step a scheduler after each step: a warm-up, then a cosine.
        norm: a BatchNorm between the layers.
    """

    def __init__(
        self, optimizer: str = "sgd", schedule: bool = False, norm: bool = False, **base: Any
    ) -> None:
        super().__init__(**base)
        self.optimizer, self.schedule = optimizer, schedule
        normalize = nn.BatchNorm1d(16) if norm else nn.Identity()
        layers = [nn.Linear(6, 16), nn.Tanh(), normalize, nn.Linear(16, 16), nn.Tanh()]
        self.sequential_module = nn.Sequential(*layers, nn.Linear(16, 3))
        self.start()
        if norm and self.pieces > 1:
            self.sequential_module[2] = NormInPieces(16, self.pieces)
            self.sequential_module[2].load_state_dict(normalize.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.sequential_module(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "two":
            return [
                torch.optim.SGD(self.sequential_module[:3].parameters(), lr=0.05, momentum=0.9),
                torch.optim.Adam(self.sequential_module[3:].parameters(), lr=0.01),
            ]
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if not self.schedule:
            return sgd
        parts = [LinearLR(sgd, 0.1, total_iters=3), CosineAnnealingLR(sgd, 8)]
        scheduler = SequentialLR(sgd, parts, [3])
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Validated(Regression):
    """With validations on samples of which no number of processes has equally many."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", mse_loss(self(x), y))

    def val_dataloader(self) -> Any:
        x, y = self.train_dataloader().dataset[:31]
        return DataLoader(TensorDataset(x, y), batch_size=8)


class Adversarial(Base):
    """Two networks against each other, with manual steps in every second batch."""

    automatic_optimization = False

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.generator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.start()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        generator, critic = self.optimizers()
        fake = self.generator(noise)
        ends = (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch
        with critic.toggle_model(sync_grad=ends):
            loss = (self.critic(fake.detach()) - self.critic(real).clamp(-3, 3)).tanh().mean()
            self.manual_backward(loss)
            if ends:
                critic.step()
                critic.zero_grad()
        with generator.toggle_model(sync_grad=ends):
            other = -self.critic(fake).tanh().mean()
            self.manual_backward(other)
            if ends:
                generator.step()
                generator.zero_grad()
        self.log_dict({"loss": loss, "other": other})

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        ]


class Experts(Base):
    """Each sample is computed by the expert that its place in the global batch says.

    So each rank uses other experts in a step, and two are used by none, other ones in each step.
    """

    PIECE = 2  # samples that an expert gets
    COUNT = GLOBAL_BATCH // PIECE + 2

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.shared = nn.Linear(6, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(self.COUNT)
        )
        self.start()

    def train_dataloader(self) -> Any:
        x, y = super().train_dataloader().dataset.tensors
        step, place = torch.arange(SAMPLES) // GLOBAL_BATCH, torch.arange(SAMPLES) % GLOBAL_BATCH
        expert = (place // self.PIECE + step) % self.COUNT
        return DataLoader(TensorDataset(x, y, expert), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, expert = batch
        x = self.shared(x).tanh()
        chosen = expert.unique().tolist()
        losses = [(self.experts[i](x[expert == i]) - y[expert == i]) for i in chosen]
        loss = torch.cat(losses).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Words(Base):
    """Embeddings whose gradients are sparse; a row may occur several times in a batch."""

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.bag = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 3)
        self.start()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        tokens = (x * 5).long() % 20
        return mse_loss(self.head(self.words(tokens[:, 0]) + self.bag(tokens[:, 1:])), y)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SparseAdam(self.words.parameters(), lr=0.01),
            torch.optim.SGD([*self.bag.parameters(), *self.head.parameters()], lr=0.05),
        ]


class ManualWords(Words):
    """Two batches a step, whose gradients wait in a checkpoint between them."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ends = (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch
        words, rest = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if ends:
            for optimizer in (words, rest):
                optimizer.clip_gradients(0.1)
                optimizer.step()
                optimizer.zero_grad()
        self.log("loss", loss)


KINDS = {
    "regression": Regression,
    "validated": Validated,
    "adversarial": Adversarial,
    "experts": Experts,
    "words": Words,
    "manual words": ManualWords,
}


def make(kind: str = "regression", **arguments: Any) -> Base:
    return KINDS[kind](**arguments)
