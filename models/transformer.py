"""The transformer block that GPT, ViT and the mixture of experts share: normalise, attend, add; normalise, feed, add.

Written so that every dim that a plan may shard is a separate tensor dim: queries, keys and values are separate
products, heads are separated from their width by a view, and no tensor is split along a dim that tensor parallelism
shards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def block_causal(documents: Tensor) -> Tensor:
    """The mask of rows that hold several documents: each position sees itself and what precedes it in its document.

    `documents` [batch, sequence] is the number of each position's document. Returns bool [batch, 1, sequence,
    sequence], true where a query (dim 2) sees a key (dim 3).
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & (places[:, None] >= places)


class SelfAttention(nn.Module):
    """x [batch, sequence, width] -> the same shape; each of `heads` heads has width / heads columns.

    `dropout` drops attention weights in training, `causal` masks later positions; a mask `seen` in its place, as of
    `block_causal`, says what each position sees.
    Raises ValueError: a width that the heads do not divide.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width = {width} is not a multiple of heads = {heads}; every head needs as many columns")
        self.columns, self.dropout, self.causal = width // heads, dropout, causal
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        q, k, v = (self._split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        dropped, causal = self.dropout if self.training else 0.0, self.causal and seen is None
        attended = functional.scaled_dot_product_attention(q, k, v, seen, dropped, causal)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> [batch, heads, sequence, width / heads]."""
        batch, sequence, width = x.shape
        return x.view(batch, sequence, width // self.columns, self.columns).transpose(1, 2)


class FeedForward(nn.Module):
    """x [..., width] -> up_proj -> gelu -> down_proj -> [..., width], `hidden` columns in between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gelu(self.up_proj(x)))
        return out


class Block(nn.Module):
    """One pre-norm layer: x [batch, sequence, width] -> the same shape.

    `dropout` is that of the two branches before they are added, `attention_dropout` that of the attention weights;
    the feed-forward part is 4 times as wide unless `hidden` says otherwise. `seen` is the mask of `SelfAttention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, attention_dropout, causal)
        self.attention_dropout = nn.Dropout(dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden or 4 * width)
        self.feed_forward_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), seen))
        out: Tensor = x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out
