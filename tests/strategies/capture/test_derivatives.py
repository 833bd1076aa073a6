"""Derivatives within a forward: loss, gradients and buffers of eager torch, for every slicing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from tests.strategies.simulated_model import TOLERANCE, Model


class Residual(nn.Module):
    """Of the heat equation, with second derivatives by a column of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        place, time = x[:, :1].requires_grad_(), x[:, 1:2].requires_grad_()
        u = self.inner(torch.cat([place, time], 1))
        by_place, by_time = grad(u, (place, time), torch.ones_like(u), create_graph=True)
        (twice,) = grad(by_place.sum(), place, create_graph=True)
        return (by_time - twice / 10).square().mean()


class Forces(nn.Module):
    """Of an energy of places, by attention, layer norm and exponential units of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = F.gelu(self.norm(self.embed(x)))
        h = (h @ h.mT - (x[:, :, None] - x.detach()[:, None]).square().sum(-1)).log_softmax(-1).exp() @ h
        energy = F.elu(800 * self.out(F.scaled_dot_product_attention(h, h, h))) + F.softplus(800 * self.out(h))
        (force,) = grad(energy.sum(), x, create_graph=True)
        return (force / 800 - x).square().mean()


class Summed(nn.Module):
    """Forces of energies that are written into sums that the forward makes, as graph networks add up messages."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = self.inner(x)
        sums = torch.zeros(4, 8, dtype=x.dtype)
        sums += 0.5
        sums.scatter_add_(0, (torch.arange(len(x)) % 4)[:, None].expand_as(h), h)
        sums[1:3].mul_(h[:2])
        (force,) = grad(sums.square().sum(), x, create_graph=True)
        return (force / 8 - x).square().mean() + sums.mean()


class Adapted(nn.Module):
    """The weights after a step on half of the batch, by one gradient with and one without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        before = F.linear(x, self.weight, self.bias).logsumexp(1).mean()
        weight, bias = grad(before, (self.weight, self.bias), create_graph=True)
        (plain,) = grad(before, self.weight, retain_graph=True)
        after = F.linear(x, self.weight - weight + plain.square(), self.bias - bias / 2)
        return F.cross_entropy(after, torch.arange(len(x)) % 4)


class Penalty(nn.Module):
    """On the gradients of a critic with activations in place, strides and statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 4, 3, groups=2),
            nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 10, 10).requires_grad_()
        value = self.critic(x)
        (slope,) = grad(value, x, torch.ones_like(value), create_graph=True, retain_graph=True)
        return value.mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("net", "shape"),
    [(Residual, (8, 2)), (Forces, (4, 4, 8)), (Summed, (8, 8)), (Adapted, (8, 8)), (Penalty, (8, 200))],
)
def test_a_derivative_is_that_of_eager_torch(net: type[nn.Module], shape: tuple[int, ...], draw: Any) -> None:
    torch.manual_seed(0)
    assert Model(net(), None, {"x": torch.randn(shape)}).worst(draw, seeds=1) < TOLERANCE
