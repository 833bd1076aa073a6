"""Feed-forward networks of any depth: with bias as linear layers, without bias as matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .matmul import MatMul


class FFN(nn.Module):
    """[batch, sizes[0]] -> dense1 -> relu -> dense2 -> ... -> denseN -> [batch, sizes[-1]], N = len(sizes) - 1.

    There is one relu module, called N - 1 times. Raises ValueError: fewer than two sizes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.depth = _depth(sizes)
        for number in range(1, self.depth + 1):
            self.add_module(f"dense{number}", nn.Linear(sizes[number - 1], sizes[number]))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, self.depth):
            x = self.relu(self.get_submodule(f"dense{number}")(x))
        out: Tensor = self.get_submodule(f"dense{self.depth}")(x)
        return out


class FlatFFN(FFN):
    """An `FFN` behind a flatten module: [batch, ...] -> [batch, sizes[0]] -> ... -> [batch, sizes[-1]]."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.flatten = nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.flatten(x))


class MatMulNet(nn.Module):
    """[batch, sizes[0]] -> matmul1 -> relu1 -> matmul2 -> ... -> matmulN -> [batch, sizes[-1]], N = len(sizes) - 1.

    Every relu is a separate module, so that each can have its own strategy.
    Raises ValueError: fewer than two sizes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        depth = _depth(sizes)
        for number in range(1, depth + 1):
            self.add_module(f"matmul{number}", MatMul(sizes[number - 1], sizes[number]))
            if number < depth:
                self.add_module(f"relu{number}", nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():  # in the order in which they were added
            x = child(x)
        return x


def _depth(sizes: Sequence[int]) -> int:
    if len(sizes) < 2:
        raise ValueError(f"sizes = {list(sizes)} names no layer; give at least two sizes, e.g. [784, 10]")
    return len(sizes) - 1
