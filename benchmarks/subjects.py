"""What is trained: models that give their loss, and data made up for them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from job import SIZES, Size

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A model whose forward is the whole of a step but for backward and update."""

    def samples(self, count: int, generator: Generator) -> Batch:
        """Inputs and targets."""
        raise NotImplementedError

    @torch.no_grad()
    def final_loss(self) -> float:
        """Loss on samples of its own: shows that it was trained, and did not just run."""
        return float(self(*self.samples(256, Generator().manual_seed(1))))


class MLP(Net):
    """So small that what is measured is what stands around it."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(32, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)

    def samples(self, count: int, generator: Generator) -> Batch:
        x = torch.randn(count, 32, generator=generator)
        return x, x[:, :10].argmax(1)


class GPT(Net):
    """A transformer of the usual form; each target is the token, plus one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        if size.tied:  # as GPT-2's
            for embedding in (self.tokens, self.places):
                nn.init.normal_(embedding.weight, std=0.02)
        else:
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.tokens.weight) if self.size.tied else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def samples(self, count: int, generator: Generator) -> Batch:
        shape = (count, self.size.context)
        tokens = torch.randint(self.size.vocabulary, shape, generator=generator)
        return tokens, (tokens + 1) % self.size.vocabulary


class Block(nn.Module):
    """Attention and a network of two layers, each beside a shortcut."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, linear = size.width, partial(nn.Linear, bias=size.bias)
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return result


class Convolutions(Net):
    """A convolutional network of 51 million parameters, on images of 192 x 192."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for number, width in enumerate((64, 128, 256, 512, *[1024] * 5)):
            stride = 2 if number < 5 else 1
            convolution = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, 1000)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(images).mean((2, 3))), targets)

    def samples(self, count: int, generator: Generator) -> Batch:
        images = torch.randn(count, 3, 192, 192, generator=generator)
        return images, torch.randint(1000, (count,), generator=generator)


class Embeddings(Net):
    """An embedding of 46 million parameters, and a network of 4 million."""

    words, width = 180_000, 256

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.words, self.width)
        self.hidden = nn.Sequential(*(self._layers() for _ in range(2)))
        self.head = nn.Linear(self.width, 1000)

    def _layers(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(self.width, 4096), nn.GELU(), nn.Linear(4096, self.width))

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(self.table(words).mean(-2))), targets)

    def samples(self, count: int, generator: Generator) -> Batch:
        words = torch.randint(self.words, (count, 64), generator=generator)
        return words, torch.randint(1000, (count,), generator=generator)


SUBJECTS: dict[str, Callable[[], Net]] = {
    "mlp": MLP,
    **{name: partial(GPT, size) for name, size in SIZES.items()},
}


def load_lazily_loaded() -> None:
    """Step a tiny model, which loads what torch loads at the first step: it is no part of a run."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
