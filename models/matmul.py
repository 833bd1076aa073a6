"""Matrix products as modules: the networks in which every operator is a product or a reduction.

The invariant: a weight is stored as [in, out], the second operand of x @ w, so that a strategy for the product
names its dims in the order in which it is written.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MatMul(nn.Module):
    """x [..., in] @ weight [in, out] -> [..., out], without bias; weight ~ N(0, 1 / in)."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, out))
        nn.init.normal_(self.weight, std=features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)


class OneMatMul(nn.Module):
    """One product: [batch, features] -> [batch, out]."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.matmul = MatMul(features, out)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.matmul(x)
        return product


class TwoMatMul(nn.Module):
    """Two products in a row: [batch, features] -> [batch, hidden] -> [batch, out]."""

    def __init__(self, features: int, hidden: int, out: int) -> None:
        super().__init__()
        self.matmul1 = MatMul(features, hidden)
        self.matmul2 = MatMul(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.matmul2(self.matmul1(x))
        return product


class ReduceMean(nn.Module):
    """The mean over one dim, which stays with size 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dim, keepdim=True)


class ReduceMeanMatMul(nn.Module):
    """A mean and then a product.

    With `dim` 1: [batch, rows, features] -> [batch, 1, features] -> [batch, 1, out]. `dim` must not be the last,
    which the product contracts.
    """

    def __init__(self, features: int, out: int, dim: int = 1) -> None:
        super().__init__()
        self.reduce_mean = ReduceMean(dim)
        self.matmul = MatMul(features, out)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.matmul(self.reduce_mean(x))
        return product
