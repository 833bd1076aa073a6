"""Llama: a causal transformer with rotary embeddings, grouped-query attention, SwiGLU feed-forward layers and RMS
norms.

Queries have `heads` heads, keys and values `kv_heads`: each serves heads / kv_heads consecutive heads of the queries.
No linear layer has a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .transformer import block_causal


class Rotary(nn.Module):
    """x [batch, heads, sequence, width] -> the same, columns i and i + width / 2 of position p rotated by the angle
    p * base ** (-2 i / width).

    The position is the place in the sequence, or what `positions` [batch, sequence] say. The tables for `length`
    positions are non-persistent buffers [length, width].
    Raises ValueError: an odd width.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, length: int, base: float = 10000.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"a head of {width} columns cannot be rotated; it needs an even number")
        speeds = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = (
            table[: x.shape[2]] if positions is None else functional.embedding(positions, table)[:, None]
            for table in (self.cos, self.sin)
        )
        return x * cos + torch.cat((-second, first), -1) * sin


class GroupedAttention(nn.Module):
    """Causal self-attention, x [batch, sequence, width] -> the same shape, for at most `length` positions; with a mask
    `seen` (`block_causal`) and `positions`, inside of documents.

    Raises ValueError: a width that `heads` does not divide, or heads that `kv_heads` does not divide.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, length: int, base: float = 10000.0) -> None:
        super().__init__()
        if width % heads or heads % kv_heads:
            raise ValueError(
                f"width = {width} must be a multiple of heads = {heads}, and heads of kv_heads = {kv_heads}"
            )
        self.columns = width // heads
        self.q_proj = nn.Linear(width, heads * self.columns, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.columns, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.columns, bias=False)
        self.rotary = Rotary(self.columns, length, base)
        self.o_proj = nn.Linear(heads * self.columns, width, bias=False)

    def forward(self, x: Tensor, seen: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        q, k, v = (self._split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        attended = functional.scaled_dot_product_attention(
            q, k, v, seen, is_causal=seen is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[batch, sequence, heads * columns] -> [batch, heads, sequence, columns]."""
        batch, sequence, width = x.shape
        return x.view(batch, sequence, width // self.columns, self.columns).transpose(1, 2)


class SwiGLU(nn.Module):
    """x [..., width] -> down_proj(silu(gate_proj(x)) * up_proj(x)), `hidden` columns in between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.silu = nn.SiLU()
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    """One pre-norm layer: x [batch, sequence, width] -> the same shape."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, length: int, base: float, eps: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps)
        self.attention = GroupedAttention(width, heads, kv_heads, length, base)
        self.feed_forward_norm = nn.RMSNorm(width, eps)
        self.feed_forward = SwiGLU(width, hidden)

    def forward(self, x: Tensor, seen: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), seen, positions)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(nn.Module):
    """input_ids [batch, sequence] int64 -> logits [batch, sequence, vocabulary] of the next token.

    `layers` layers of `width` columns, `heads` heads of queries and `kv_heads` of keys and values, `hidden` columns in
    the gated part; positions up to `length`, rotary base `base`; `eps` is that of the RMS norms. With the arguments of
    Llama 3 8B (128256, 8192, 4096, 32, 32, 8, 14336) it has its 8,030,261,248 parameters. `documents` and `positions`
    are those of `models.gpt.GPT`.
    Raises ValueError: a sequence longer than `length`.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        base: float = 10000.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            LlamaLayer(width, heads, kv_heads, hidden, length, base, eps) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if input_ids.shape[1] > self.length:
            raise ValueError(f"a sequence of {input_ids.shape[1]} tokens, but argument length is {self.length}")
        x = self.tokens(input_ids)
        seen = None if documents is None else block_causal(documents)
        for layer in self.layers:
            x = layer(x, seen, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits
