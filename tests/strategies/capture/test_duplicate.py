"""Copies of modules compute with their own tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategies.capture import duplicate


class Tied(nn.Module):
    """A head that is a function of the embedding, which the constructor defines, and one of that."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, scale = nn.Embedding(4, 3), torch.tensor(2.0)
        self.head = lambda h: h @ self.embedding.weight.T * scale
        self.heads = [lambda h: self.head(h).tanh(), torch.sigmoid]

    def forward(self, ids: Tensor) -> Tensor:
        for head in self.heads:
            ids = head(self.embedding(ids) if ids.dtype == torch.int64 else ids)
        return ids


def test_functions_of_a_copy_close_over_the_copy() -> None:
    original = Tied()
    copied = duplicate(original)
    copied(torch.tensor([1, 2])).sum().backward()
    assert original.embedding.weight.grad is None
    assert copied.embedding.weight.grad.abs().sum() > 0
    original(torch.tensor([1, 2])).sum().backward()
    assert torch.equal(original.embedding.weight.grad, copied.embedding.weight.grad)
