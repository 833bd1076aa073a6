"""A vocabulary embedding and a feed-forward network on top of it: the smallest model with a table worth slicing."""

from __future__ import annotations

from torch import Tensor, nn

from .transformer import FeedForward


class VocabularyFFN(nn.Module):
    """input_ids [batch, sequence] int64 -> embedding -> feed_forward -> head -> logits [batch, sequence, vocabulary].

    Positions are independent: the next token is predicted from the last one alone. `hidden` columns in the
    feed-forward part.
    """

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.feed_forward = FeedForward(width, hidden)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.feed_forward(self.embedding(input_ids)))
        return logits
