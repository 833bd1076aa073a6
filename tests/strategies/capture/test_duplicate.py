"""Copies of modules compute with their own tensors."""

from __future__ import annotations

from types import SimpleNamespace

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


class Keeping(nn.Module):
    """A criterion that is no module keeps what it was given, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.criterion = nn.Linear(3, 2), SimpleNamespace(parts=[SimpleNamespace(last=None)])

    def forward(self, x: Tensor) -> Tensor:
        self.criterion.parts[0].last = self.linear(x)
        return self.criterion.parts[0].last.square().mean()


def test_what_an_object_keeps_of_a_forward_is_copied_without_its_history() -> None:
    original, x = Keeping(), torch.randn(4, 3)
    loss = original(x)
    copied = duplicate(original)
    kept = [one.criterion.parts[0].last for one in (original, copied)]
    assert torch.equal(*kept) and kept[0] is not kept[1] and kept[1].is_leaf
    assert torch.equal(copied(x), loss)
