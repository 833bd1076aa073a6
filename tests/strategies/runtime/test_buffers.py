"""Buffer updates take effect as if all were written at once."""

from __future__ import annotations

import torch

from strategies.runtime.module_tree import store


def test_buffers_can_exchange_their_values() -> None:
    first, second = torch.arange(4.0).view(2, 2), torch.ones(4)
    store([first, second], [second.view(2, 2), first.view(4)])
    assert first.tolist() == [[1, 1], [1, 1]] and second.tolist() == [0, 1, 2, 3]


def test_values_are_cast_and_give_no_gradient() -> None:
    buffer, weight = torch.zeros(2, dtype=torch.float64), torch.ones(2, requires_grad=True)
    store([buffer], [weight * 3])
    assert buffer.tolist() == [3, 3] and not buffer.requires_grad
