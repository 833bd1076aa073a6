"""Sizes that a forward reads from integers of the batch: those of the first batch, which every step compares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright
from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError

ROWS = 8
CLASSES = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
LENGTHS = torch.tensor([3, 3, 1, 2, 3, 1, 2, 1])


def pooled(net: Net, x: Tensor, n: Tensor) -> Tensor:
    count = int(n.max()) + 1
    made = torch.zeros(count, 6, dtype=x.dtype).index_add(0, n, net.first(x).tanh())
    return net.last(made).square()


def of_the_last(net: Net, x: Tensor, n: Tensor) -> Tensor:
    h = net.first(x)
    return (
        net.last(h.new_zeros(n[-1].item() + 1, 6).scatter_add(0, n[:, None].expand_as(h), h))
        / torch.bincount(n)[:, None]
    )


def one_hot(net: Net, x: Tensor, n: Tensor) -> Tensor:
    return net.last(net.first(x))[:, :1] * F.one_hot(n).to(x.dtype)


def cut(net: Net, x: Tensor, n: Tensor) -> Tensor:
    mask = torch.arange(n.max())[None] < n[:, None]
    return net.first(x)[:, : n.max()] * mask


def repeated(net: Net, x: Tensor, n: Tensor) -> Tensor:
    return net.last(torch.repeat_interleave(net.first(x), n, dim=0)).square()


def parts(net: Net, x: Tensor, n: Tensor) -> Tensor:
    return torch.stack([part.mean(0) for part in net.first(x.repeat(2, 1)).split(n.tolist())]).square()


def steps(net: Net, x: Tensor, n: Tensor) -> Tensor:
    h = net.first(x)
    for _ in range(int(n.max())):
        h = h.tanh()
    return h


def counted(net: Net, x: Tensor, n: Tensor) -> Tensor:
    """Where each class begins, written into a slice as long as there are classes."""
    count = int(n.max()) + 1
    begins = x.new_empty(count + 1)
    begins[:1] = 0
    begins.narrow(0, 1, count).copy_(x.new_zeros(count).index_add(0, n, torch.ones_like(x[:, 0])).cumsum(0))
    return net.first(x) * begins[n][:, None]


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Linear(5, 6), nn.Linear(6, 6), body

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.body(self, x, n).square().mean()


@pytest.mark.parametrize(
    ("body", "n"),
    [
        (pooled, CLASSES),
        (of_the_last, CLASSES),
        (one_hot, CLASSES),
        (counted, CLASSES),
        (cut, LENGTHS),
        (repeated, LENGTHS),
        (parts, LENGTHS),
        (steps, LENGTHS),
    ],
)
def test_a_size_is_that_of_the_batch(body: Callable[..., Tensor], n: Tensor) -> None:
    torch.manual_seed(0)
    net = Net(body).double()
    batch = torch.randn(ROWS, 5, dtype=torch.float64), n
    plan = meshwright.plan(net, batch, mesh=4, mode="data_parallel")
    assert meshwright.verify(net, batch, plan).passed
    other = batch[0], n.roll(1) if body in (repeated, parts) else n.clamp(max=2)
    with pytest.raises(Exception, match=r"test_sizes_of_batch.py.*reads .* from the entry 1"):
        meshwright.verify(net, other, plan)


def test_a_plan_that_slices_the_entry_compares_all_of_it() -> None:
    torch.manual_seed(0)
    net, batch = Net(repeated).double(), (torch.randn(ROWS, 5, dtype=torch.float64), LENGTHS)
    plan = meshwright.plan(net, batch, mesh=4, strategies={"compared": [[4], [1]]})
    assert meshwright.verify(net, batch, plan).passed


def test_no_number_is_read_that_weights_decide() -> None:
    def steps_by_weights(net: Net, x: Tensor, n: Tensor) -> Tensor:
        h = net.first(x)
        for _ in range(int(h.detach().abs().sum().long()) % 3 + 1):
            h = h.tanh()
        return h

    with pytest.raises(StrategyError, match="values of a tensor"):
        capture(Objective(Net(steps_by_weights), None, ("x", "n"), ()), (torch.randn(ROWS, 5), CLASSES), training=True)
