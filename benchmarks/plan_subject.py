"""Models that no formula of `plan` was fitted to: `plan` and the memory benchmark train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from my_project_trainer import TrainingModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from memory_subject import GPT, SIZE, Block, Tokens

SAMPLES = 4096


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples drawn by their index, one a step and rank.

    Args:
        model: makes them.
        samples: how many.
        fetched: called before each is made.
    """

    def __init__(self, model: Subject, samples: int, fetched: Callable[[], None]) -> None:
        self.make, self.samples, self.fetched = model.sample, samples, fetched

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched()
        return self.make(torch.Generator().manual_seed(index))


class Subject(TrainingModule):
    """What the models have in common: Adam, cross-entropy, and samples of their own."""

    loader: Callable[[], DataLoader[Any]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @staticmethod
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, -2), targets.flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-5)

    def train_dataloader(self) -> DataLoader[Any]:
        if self.loader is not None:
            return self.loader()
        return DataLoader(Samples(self, SAMPLES, lambda: None), batch_size=1)


class MemoryGPT(GPT):
    """The GPT of docs/memory.md."""

    def __init__(self) -> None:
        samples = Tokens(SAMPLES, lambda: None)
        super().__init__(SIZE, lambda: DataLoader(samples, batch_size=1))


class LongGPT(Subject):
    """A GPT of 63 million parameters, with 384 tokens in a sequence: activations count."""

    words, context, width, depth = 4096, 384, 640, 12

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.words, self.width)
        self.places = nn.Embedding(self.context, self.width)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(self.depth))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, self.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(self.context))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @staticmethod
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(LongGPT.words, (LongGPT.context,), generator=generator)
        return tokens, (tokens + 1) % LongGPT.words


class Convolutions(Subject):
    """A convolutional network of 51 million parameters, on one image of 192 x 192."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for number, width in enumerate((64, 128, 256, 512, *[1024] * 5)):
            stride = 2 if number < 5 else 1
            layers += [
                nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, 1000)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits

    @staticmethod
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        image = torch.randn(3, 192, 192, generator=generator)
        return image, torch.randint(1000, (), generator=generator)


class Embeddings(Subject):
    """An embedding of 46 million parameters, and a network of 4 million."""

    words, width = 180_000, 256

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.words, self.width)
        self.hidden = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(self.width, 4096), nn.GELU(), nn.Linear(4096, self.width))
                for _ in range(2)
            )
        )
        self.head = nn.Linear(self.width, 1000)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.table(words).mean(-2)))
        return logits

    @staticmethod
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(Embeddings.words, (64,), generator=generator)
        return words, torch.randint(1000, (), generator=generator)


class Tiny(Subject):
    """Nearly nothing: what a process needs for a run of any model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1000)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return logits

    @staticmethod
    def sample(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(64, generator=generator), torch.randint(1000, (), generator=generator)
