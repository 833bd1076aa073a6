"""Elements and slices whose place a tensor holds, and what a mask selects for the same mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.capture.indexed import indexed
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


class Memory(nn.Module):
    """Keeps some of its outputs, from a place in a buffer on, and computes with what `use` makes of them."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.use = nn.Linear(6, 6), use
        self.register_buffer("place", torch.tensor([4]))
        self.register_buffer("step", torch.tensor(2))
        self.register_buffer("kept", torch.arange(144.0).reshape(24, 6) / 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x).square().mean()


def queue(net: Any, x: Tensor) -> Tensor:
    """Of MoCo."""
    place, outputs = int(net.place), net.inner(x)
    found = outputs @ net.kept.clone().mT
    net.kept[place : place + len(x)] = outputs.detach()
    net.place[0] = (place + len(x)) % len(net.kept)
    return found


def ring(net: Any, x: Tensor) -> Tensor:
    place = net.place.item()
    net.kept[None, place : place + 8, 1:5] = x.detach()[:, 1:5]
    net.place.fill_((place + 8) % 24)
    return net.inner(x) - net.kept[..., place - 1 : place + 7, :]


def element(net: Any, x: Tensor) -> Tensor:
    net.kept[net.step, 1] = net.inner.weight.detach()[0, 0]
    net.kept[:, int(net.step) % 6] = 0.5 * float(net.kept[1, 2])
    net.step += 1
    return net.inner(x) - net.inner.weight[net.step] - net.kept[0, int(net.step) - 1] * net.kept[net.step - 8]


def chosen_by_bytes(net: Any, x: Tensor) -> Tensor:
    """As pytorch-crf does, whose masks are bytes."""
    mask = (x > 0).to(torch.uint8)
    return torch.where(mask, net.inner(x), x) + net.inner(x).where(mask[:, :1], 2 * x)


def logged(net: Any, x: Tensor) -> Tensor:
    found = net.inner(x)
    net.last = float(found.detach().mean())
    return found * (float(net.step) / 10) / int(net.place)


def masked(net: Any, x: Tensor) -> Tensor:
    """Of PointNet++."""
    found, near, rows = net.inner(x) * 3, x > 0.2, x[:, 0] > 0
    distance = torch.full_like(found, 10.0)
    distance[near] = found[near]
    distance[rows] -= 0.5
    found[rows] = (distance[rows] * 2 + 1) / 3
    return found + distance


def masked_again(net: Any, x: Tensor) -> Tensor:
    """Of YOLO: the mask is computed once more."""
    found, kept = net.inner(x), torch.zeros_like(x)
    kept[(x > 0.2) & ~(x[:, :1] < 0)] = found[(x > 0.2) & ~(x[:, :1] < 0)]
    kept[torch.gt(x, x.mT.mT) | (x > 1)] = 0.5
    return kept * found


def masked_in_place(net: Any, x: Tensor) -> Tensor:
    found, near = net.inner(x), x > 0.2
    part = found[near]
    part += torch.ones_like(part)
    found[near] = part
    return found


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:where received a uint8")
@pytest.mark.parametrize(
    "use",
    [queue, ring, element, logged, masked, masked_again, masked_in_place, chosen_by_bytes],
    ids=lambda one: one.__name__,
)
def test_a_model(use: Callable[[Any, Tensor], Tensor], draw: Any) -> None:
    torch.manual_seed(0)
    assert Model(Memory(use), None, {"x": torch.randn(8, 6)}).worst(draw, seeds=1) < TOLERANCE


def other_mask(net: Any, x: Tensor) -> Tensor:
    found, near = net.inner(x), x > 0.2
    found[~near.flip(0).flip(0).logical_not()] = found[near]
    return found


def other_limit(net: Any, x: Tensor) -> Tensor:
    found = net.inner(x)
    found[x > 0.2] = found[x > 0.3]
    return found


def mask_of_other_values(net: Any, x: Tensor) -> Tensor:
    found = net.inner(x)
    shifted = found.detach().clone()
    part = found[shifted > 0.2]
    shifted += 0.1
    found[shifted > 0.2] = part
    return found


def drawn_masks(net: Any, x: Tensor) -> Tensor:
    found = net.inner(x)
    found[torch.rand_like(x) > 0.2] = found[torch.rand_like(x) > 0.2]
    return found


def rewritten(net: Any, x: Tensor) -> Tensor:
    found, near = net.inner(x), x > 0.2
    part = found[near]
    found.mul_(2)
    found[near] = part
    return found


REFUSED = [other_mask, other_limit, mask_of_other_values, drawn_masks, rewritten]


@pytest.mark.parametrize("use", REFUSED, ids=lambda one: one.__name__)
def test_what_a_mask_selects_and_a_forward_changes_is_refused(use: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(StrategyError, match="shape depends on values"):
        capture(Objective(Memory(use), None, ("x",), ()), (torch.randn(8, 6),), training=True)


def test_places() -> None:
    matrix, place = torch.randn(4, 6), torch.tensor(-2)
    assert torch.equal(indexed(matrix, [slice(1, 3), place]), matrix[1:3, -2])
    with pytest.raises(IndexError):
        indexed(matrix, [place + 6])
