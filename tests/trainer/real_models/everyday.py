"""Models that many users write, in plain torch; each has one thing that a strategy may get wrong.

``options`` are those of the trainer that a model is trained with.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from .base import GLOBAL_BATCH, STEPS, Base, Manual, network


def adamw(parameters: Any, rate: float = 0.01) -> optim.Optimizer:
    """Of a larger ``eps``: Adam divides by small gradients' norms, which amplifies rounding."""
    return optim.AdamW(parameters, rate, eps=1e-3)


class Numbers(Base):
    """Six numbers, noise of three, and a class: few samples, so that the last batch is smaller."""

    length = STEPS * GLOBAL_BATCH - 3

    def sample(self, generator: torch.Generator) -> Any:
        numbers, noise = (torch.randn(size, generator=generator) for size in (6, 3))
        return numbers, noise, torch.randint(3, (), generator=generator)

    def samples(self) -> Any:
        return super().samples()[: self.length]


class Chain(Numbers):
    """Layers that a pipeline divides and tensor parallelism shards."""

    parallelize_plan = {  # noqa: RUF012
        "sequential_module.0": ColwiseParallel(),
        "sequential_module.2": RowwiseParallel(),
    }

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.sequential_module = network(6, outputs)

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.sequential_module(batch[0]), batch[2])


class ClassWeights(Chain):
    """A mean over the weights of the samples' classes."""

    options = {"gradient_clip_val": 0.3}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.2, 1.0, 3.0]))

    def count_weight(self, batch: Any) -> float:
        return float(self.weights.cpu()[batch[2]].sum())

    def loss(self, batch: Any) -> Tensor:
        logits = self.sequential_module(batch[0])
        return functional.cross_entropy(logits, batch[2], weight=self.weights)


class Convolutions(Numbers):
    """Each replica and each micro-batch is normalized by itself."""

    length = STEPS * GLOBAL_BATCH

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)]
        self.sequential_module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3))

    def sample(self, generator: torch.Generator) -> Any:
        return torch.randn(1, 6, 6, generator=generator), torch.randint(3, (), generator=generator)

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.sequential_module(batch[0]), batch[1])


class Skips(Convolutions):
    """A U-Net; statistics of BatchNorm are those of the whole batch."""

    options = {"sync_batchnorm": True}  # noqa: RUF012

    def __init__(self) -> None:
        Numbers.__init__(self)
        self.down, self.norm = nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.middle, self.up = nn.Conv2d(4, 4, 3, 1, 1), nn.ConvTranspose2d(8, 4, 2, 2)
        self.head = nn.Conv2d(5, 1, 1)

    def loss(self, batch: Any) -> Tensor:
        down = self.norm(self.down(batch[0])).relu()
        up = self.up(torch.cat([down, self.middle(down).relu()], 1))
        return functional.mse_loss(self.head(torch.cat([up, batch[0]], 1)), batch[0].roll(1, 2))


class Sentences(Numbers):
    """Words of several lengths, padded as the batch needs it, and the last word as a class."""

    words = 11

    def sample(self, generator: torch.Generator) -> Any:
        length = int(torch.randint(2, 8, (), generator=generator))
        return torch.randint(1, self.words, (length,), generator=generator)

    @staticmethod
    def collate(samples: Any) -> Any:
        lengths = torch.tensor([len(sample) for sample in samples])
        classes = torch.stack([sample[-1] % 3 for sample in samples])
        return {"words": pad_sequence(samples, True), "lengths": lengths, "classes": classes}


class Recurrent(Sentences):
    """An LSTM, whose gradients are ready in another order for other lengths; a masked mean."""

    options = {"global_batch_size": 4}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.words, 8, padding_idx=0)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        embedded, lengths = self.embed(batch["words"]), batch["lengths"].cpu()
        packed = pack_padded_sequence(embedded, lengths, True, enforce_sorted=False)
        outputs = pad_packed_sequence(self.lstm(packed)[0], True)[0]
        mask = (batch["words"][:, : outputs.shape[1]] != 0).unsqueeze(-1)
        pooled = (outputs * mask).sum(1) / mask.sum(1)
        return functional.cross_entropy(self.head(pooled), batch["classes"])


class Block(nn.Module):
    """Residual attention; without dropout, which would be random."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=True)
        self.norm, self.layers = nn.LayerNorm(8), network(8, 8)

    def forward(self, x: Tensor, padding: Tensor, causal: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, attn_mask=causal)[0]
        return x + self.layers(x)


class Attention(Sentences):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(self.words, 8), Block()
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        padding = batch["words"] == 0
        features = self.block(self.embed(batch["words"]), padding)[:, 0]
        return functional.cross_entropy(self.head(features), batch["classes"])


class TinyGPT(Attention):
    """A tied head, a mean over tokens, AdamW, a warm-up, and clipping; two micro-batches."""

    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, self.words, bias=False)
        self.head.weight = self.embed.weight

    def count_weight(self, batch: Any) -> float:
        return float((batch["words"][:, 1:] != 0).sum())

    def loss(self, batch: Any) -> Tensor:
        tokens, labels = batch["words"][:, :-1], batch["words"][:, 1:]
        causal = torch.ones(tokens.shape[1], tokens.shape[1], device=tokens.device).triu(1).bool()
        logits = self.head(self.block(self.embed(tokens), tokens == 0, causal))
        return functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0)

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        rates = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


class Autoencoder(Chain):
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(6)

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.sequential_module(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


class Variational(Numbers):
    """Its noise comes with the samples, not from each process' generator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(6, 6), network(3, 6)

    def loss(self, batch: Any) -> Tensor:
        mean, log_variance = self.encoder(batch[0]).chunk(2, 1)
        decoded = self.decoder(mean + (log_variance / 2).exp() * batch[1])
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return functional.mse_loss(decoded, batch[0]) + 0.1 * divergence


class Siamese(Numbers):
    """One encoder, called twice in a step."""

    options = {"accumulate_grad_batches": 2}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network(3, 4)

    def loss(self, batch: Any) -> Tensor:
        one, other = (self.encoder(half) for half in batch[0].chunk(2, 1))
        distances, equal = (one - other).norm(dim=1), batch[2] == 0
        return torch.where(equal, distances**2, (1 - distances).clamp(min=0) ** 2).mean()


class Teacher(Chain):
    """A mean teacher, which a hook updates and the loss follows."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.sequential_module).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        logits = self.sequential_module(batch[0])
        followed = functional.mse_loss(logits, self.teacher(batch[0] + 0.1))
        return functional.cross_entropy(logits, batch[2]) + followed

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pairs = zip(self.teacher.parameters(), self.sequential_module.parameters(), strict=True)
        for teacher, student in pairs:
            teacher.mul_(0.7).add_(student, alpha=0.3)


class Clamped(Chain):
    """A critic whose weights are clamped after each batch."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.clamp_(-0.2, 0.2)


class OwnClipping(Chain):
    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Recommender(Numbers):
    """Factors of users and items, and biases of them; a step uses some rows."""

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(10, 5), nn.Embedding(7, 5)

    def sample(self, generator: torch.Generator) -> Any:
        user, item = (torch.randint(size, (), generator=generator) for size in (10, 7))
        return user, item, torch.rand((), generator=generator)

    def loss(self, batch: Any) -> Tensor:
        user, item, rating = self.users(batch[0]), self.items(batch[1]), batch[2]
        scores = (user[:, 1:] * item[:, 1:]).sum(1) + user[:, 0] + item[:, 0]
        return functional.mse_loss(0.2 * scores, rating)


class Heads(Numbers):
    """Three heads, of whose labels some are missing: a mean over those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = network(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

    def count_weight(self, batch: Any) -> float:
        return float((batch[1] > 0).sum())

    def loss(self, batch: Any) -> Tensor:
        features, there = self.trunk(batch[0]).tanh(), batch[1] > 0
        predicted = torch.cat([head(features) for head in self.heads], 1)
        return ((predicted - batch[1]) ** 2 * there).sum() / there.sum().clamp(min=1)


class Transfer(Chain):
    """A frozen backbone in evaluation, an unfrozen layer and a head with rates of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone.eval()

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.sequential_module(self.backbone(batch[0])), batch[2])

    def configure_optimizers(self) -> Any:
        first, _, head = self.sequential_module
        rates = [{"params": first.parameters(), "lr": 0.005}, {"params": head.parameters()}]
        optimizer = adamw(rates, 0.05)
        falls = optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


class Adversarial(Manual, Numbers):
    """A GAN: manual optimization of two networks with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = network(3, 6), network(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        fake = self.generator(batch[1])
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):
            with optimizer.toggle_model():
                gap = self.critic(fake).mean() - self.critic(batch[0]).sigmoid().mean()
                self.manual_backward(sign * gap)
                optimizer.step()
                optimizer.zero_grad()
            fake = fake.detach()
        self.log("loss", gap)


class Regression(Numbers):
    """Linear regression, whose manual step computes its loss in a closure."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(self.linear(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        self.log("loss", closure())
        optimizer.step()


class Graphs(Numbers):
    """Nodes of all graphs of a batch in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = network(4, 8), nn.Linear(8, 1)

    def sample(self, generator: torch.Generator) -> Any:
        nodes = int(torch.randint(2, 6, (), generator=generator))
        return torch.randn(nodes, 4, generator=generator)

    @staticmethod
    def collate(samples: Any) -> Any:
        nodes = torch.tensor([len(sample) for sample in samples])
        index = torch.arange(len(samples)).repeat_interleave(nodes)
        return {"nodes": torch.cat(samples), "graph": index, "sizes": nodes}

    def count_samples(self, batch: Any) -> int:
        return len(batch["sizes"])

    def loss(self, batch: Any) -> Tensor:
        nodes, sizes = self.node(batch["nodes"]), batch["sizes"]
        sums = nodes.new_zeros(len(sizes), 8).index_add(0, batch["graph"], nodes)
        return functional.mse_loss(self.head(sums)[:, 0], sizes / 5)
