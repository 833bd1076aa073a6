"""GPT: a causal transformer with learned positions, whose output layer is tied to the token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .transformer import Block, block_causal


class GPT(nn.Module):
    """input_ids [batch, sequence] int64 -> logits [batch, sequence, vocabulary] of the next token.

    `vocabulary` tokens, `length` positions at most, `layers` blocks of `width` columns in `heads` heads. `dropout` is
    that of embeddings and branches, `attention_dropout` that of attention weights. With the arguments of GPT-2 small
    (50257, 1024, 768, 12, 12) it has its 124,439,808 parameters. Attention is causal, so right padding needs no mask.
    Of rows that hold several documents, `documents` [batch, sequence] numbers each position's and `positions` counts
    inside of it (`runner.data.packing`): attention stays inside of a document.
    Raises ValueError: a sequence longer than `length`.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Block(width, heads, dropout=dropout, attention_dropout=attention_dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, input_ids: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        length, longest = input_ids.shape[1], self.positions.num_embeddings
        if length > longest:
            raise ValueError(f"a sequence of {length} tokens, but the model has {longest} positions (argument length)")
        places = torch.arange(length, device=input_ids.device) if positions is None else positions
        x = self.dropout(self.tokens(input_ids) + self.positions(places))
        seen = None if documents is None else block_causal(documents)
        for layer in self.layers:
            x = layer(x, seen)
        logits: Tensor = self.head(self.norm(x))
        return logits
