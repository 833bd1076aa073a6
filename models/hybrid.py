"""A network that does its own communication, and the one-device network it must equal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategies import collectives


class HybridMatMul(nn.Module):
    """x [batch, features] @ weight [features, out], with the contracted dim sliced over the mesh axis `axis`.

    On n ranks each holds x_local [batch, features / n] and weight [features / n, out]; the product is a partial
    sum, and the all-reduce completes it, so that every rank returns the full [batch, out]. Without a configured
    mesh all ranks form the one axis `world`.
    """

    def __init__(self, features: int = 512, out: int = 128, axis: str = "world") -> None:
        super().__init__()
        self.axis = axis
        self.weight = collectives.shard_parameter(_full_weight(features, out), dim=0, axes=axis)

    def forward(self, x_local: Tensor) -> Tensor:
        return collectives.all_reduce(torch.matmul(x_local, self.weight), self.axis)


class DenseMatMul(nn.Module):
    """The same product on one device: the same parameter name, and the same weight from the same seed."""

    def __init__(self, features: int = 512, out: int = 128) -> None:
        super().__init__()
        self.weight = _full_weight(features, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)


def _full_weight(features: int, out: int) -> nn.Parameter:
    """[features, out] ~ N(0, 1 / features), the same full matrix on every rank, so that slices belong to one matrix."""
    weight = nn.Parameter(torch.empty(features, out))
    nn.init.normal_(weight, std=features**-0.5)
    return weight
