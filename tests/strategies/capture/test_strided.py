"""as_strided trains as in eager torch, in double precision and under random plans: windows that overlap, of contiguous
and of permuted tensors; what reads memory that its operand does not show is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from operator import mul
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.capture.strided import axes, windows
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


class Net(nn.Module):
    """A linear layer whose result [4, 8, 6] is read by strides; the weights of the result differ."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.dense = read, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found = self.read(self.dense(x).tanh())
        weights = torch.arange(float(found.numel()), dtype=found.dtype).reshape(found.shape).cos()
        return (found * weights).square().sum()


def halves(x: Tensor) -> Tensor:
    """Windows of half a chunk beside each other, as Longformer's, of heads that a permutation leaves in memory."""
    heads = x.view(4, 8, 2, 3).permute(2, 0, 1, 3).reshape(2, 32, 3)
    chunks = heads.view(2, 8, 4, 3)
    apart, step, row, one = chunks.stride()
    return chunks.as_strided((2, 15, 4, 3), (apart, step // 2, row, one))


def image(x: Tensor) -> Tensor:
    """Patches of every row's picture, behind its first line."""
    return x.as_strided((4, 6, 4, 2, 3), (48, 6, 1, 6, 1), 6)


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": lambda x: x.as_strided((4, 3, 4, 6), (48, 12, 6, 1)),
    "halves": halves,
    "image": image,
    "across rows": lambda x: x.as_strided((5, 60), (32, 1), 3),
    "every third": lambda x: x.as_strided((4, 1, 16), (48, 7, 3)),
    "one element": lambda x: x.as_strided((), (), 5),
    "transposed": lambda x: x.transpose(0, 1).as_strided((6, 4, 8), (1, 48, 6)),
    "of a slice": lambda x: x[:, 2:7].as_strided((4, 3, 3, 6), (48, 6, 6, 1)),
    "written behind it": lambda x: x.clone().mul_(x).as_strided((4, 7, 2, 6), (48, 6, 6, 1)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", READS)
def test_trains_like_the_model(name: str, draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(READS[name]), None, (torch.randn(4, 8, 6),))
    assert not any(operator.op.startswith("as_strided") for operator in model.graph.operators)
    assert model.worst(draw) < TOLERANCE


def _addresses(sizes: Sequence[int], strides: Sequence[int], first: int) -> set[int]:
    return {first + sum(map(mul, at, strides)) for at in product(*map(range, sizes))}


def test_windows_are_the_same_memory() -> None:
    """Drawn strides: views of the same elements, for nearly all that the operand shows."""
    rng, found, possible = random.Random(0), 0, 0
    for _ in range(3000):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        order = rng.sample(range(len(shape)), len(shape))
        memory = torch.arange(600)[rng.randint(0, 3) :: rng.randint(1, 2)]
        x = memory[: math.prod(shape)].view(shape).permute(order)
        wanted = [(rng.randint(1, 4), rng.choice([*x.stride(), 1, 2, 3, 6])) for _ in range(rng.randint(0, 4))]
        sizes, strides = [size for size, _ in wanted], [stride for _, stride in wanted]
        skipped = rng.choice([0, 0, 1, 2])
        shown = _addresses(sizes, strides, skipped) <= _addresses(x.shape, x.stride(), 0)
        possible += shown
        steps = windows(axes(x.shape, x.stride()), axes(sizes, strides), skipped)
        if steps is None:
            continue
        assert shown
        view = x
        for target, args in steps:
            view = target(view, *args)
        assert view.data_ptr() == x.data_ptr() + skipped * x.element_size()
        assert torch.equal(view, x.as_strided(sizes, strides, x.storage_offset() + skipped))
        found += 1
    assert found > 0.9 * possible > 900


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "beside a slice": lambda x: x[:, :4].as_strided((4, 8, 6), (48, 6, 1)),
    "repeated": lambda x: x.as_strided((4, 5), (48, 0)),
    "expanded": lambda x: x[:1].expand(4, 8, 6).as_strided((8, 6), (6, 1)),
    "a copy": lambda x: torch.as_strided_copy(x, (4, 6), (48, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(StrategyError, match=r"capture/test_strided.py:\d+") as caught:
        capture(Objective(Net(REFUSED[name]), None, ("x",), ()), (torch.randn(4, 8, 6),), training=True)
    assert caught.value.code == "MW906"
