"""A byte-level GPT: a decoder-only transformer over the 256 byte values."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from my_project_trainer import TrainingModule, UserError

from .transformer import Block

_VOCABULARY = 256


class LanguageModel(TrainingModule):
    """A small GPT-2 architecture on bytes; logs the loss in nats, and bits per byte.

    Args:
        layers: Number of transformer blocks.
        heads: Attention heads per block.
        width: Size of the residual stream, divisible by ``heads``.
        context: Maximum sequence length.
        dropout: Dropout probability.
        learning_rate: Learning rate of AdamW after the warm-up.
        warmup_steps: Linear warm-up steps of the learning rate.
        weight_decay: Weight decay of matrices; vectors are not decayed.
    """

    def __init__(
        self,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        context: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        warmup_steps: int = 100,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.heads, self.learning_rate = heads, learning_rate
        self.warmup_steps, self.weight_decay = warmup_steps, weight_decay
        self.example_input_array = torch.zeros(1, context, dtype=torch.int64)
        self.bytes = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        for name, layer in self.named_modules():
            self.initialize(name, layer)
        # Each weight of a layer takes two operations per byte, and attention two products over the
        # context; backward takes twice as many (https://arxiv.org/abs/2204.02311, appendix B).
        parts = (self.blocks, self.norm, self.head)
        weights = sum(p.numel() for module in parts for p in module.parameters())
        self.flops_per_sample = context * (6.0 * weights + 12.0 * layers * width * context)

    def initialize(self, name: str, layer: nn.Module) -> None:
        """Initialize like GPT-2: matrices from a normal distribution with deviation 0.02."""
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        """Shard heads, feed-forward layers, bytes and classes; between them, shard the sequence."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as styles

        if self.heads % mesh.tensor:
            raise UserError(f"model.heads={self.heads} is not divisible by tensor={mesh.tensor}")
        replicated, by_time = Replicate(), Shard(1)
        return {
            "bytes": styles.RowwiseParallel(input_layouts=replicated, output_layouts=by_time),
            "positions": styles.RowwiseParallel(input_layouts=replicated, output_layouts=Shard(0)),
            "blocks.*": mesh.styles.ShardedRandomness(),
            "blocks.*.norm*": styles.SequenceParallel(),
            "blocks.*.attention": styles.PrepareModuleInput(
                input_layouts=by_time, desired_input_layouts=replicated
            ),
            "blocks.*.attention.inputs": styles.ColwiseParallel(),
            "blocks.*.attention.output": styles.RowwiseParallel(output_layouts=by_time),
            "blocks.*.up": styles.ColwiseParallel(input_layouts=by_time),
            "blocks.*.down": styles.RowwiseParallel(output_layouts=by_time),
            "norm": styles.SequenceParallel(),
            "head": mesh.styles.LossParallel(input_layouts=by_time),
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (batch, time, 256) of the next byte from bytes (batch, time) as int64."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]

    def count_tokens(self, batch: Tensor) -> int:
        """Count the bytes that are predicted."""
        return batch[:, 1:].numel()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._log_quality("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._log_quality("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Predict the most likely next byte of each sequence."""
        # With dim=-1, torch 2.13 fails for a batch of one under tensor parallelism.
        following: Tensor = self(batch[:, :-1]).argmax(dim=2)
        return following[:, -1]

    @property
    def sequential_module(self) -> nn.Sequential:
        """The layers that ``strategy="sequential"`` divides over processes."""
        return self.blocks

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95), fused=True)
        warmup = LinearLR(optimizer, 1 / max(self.warmup_steps, 1), total_iters=self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1]).reshape(-1, _VOCABULARY)
        return cross_entropy(logits, batch[:, 1:].reshape(-1))

    def _log_quality(self, stage: str, batch: Tensor) -> None:
        loss = self._loss(batch)
        self.log(f"{stage}_loss", loss)
        self.log(f"{stage}_bits_per_byte", loss / math.log(2), prog_bar=True)
