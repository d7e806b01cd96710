"""The layers of the language model: causal self-attention, and a transformer block."""

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position attend to itself and earlier positions."""
        # Heads are the outer dimension, and so may be sharded: a process may have some of them.
        parts = self.inputs(x).unflatten(2, (-1, 3, x.shape[2] // self.heads))
        query, key, value = parts.transpose(1, 2).unbind(dim=3)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(start_dim=2))
        return output


class Block(nn.Module):
    """Attention and a feed-forward layer, each with pre-normalization and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to (batch, time, width)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        output: Tensor = x + self.dropout(self.down(gelu(self.up(self.norm2(x)))))
        return output
