"""The data: any map-style dataset. Every rank reads only the rows that it needs."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Spirals:
    """Points on three spirals, with noise; row i is (point [2], number of its spiral).

    Args:
        rows: how many points.
        seed: draws other points.
    """

    def __init__(self, rows: int = 2048, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.arange(rows) % 3
        radius = torch.rand(rows, generator=generator)
        angle = 5 * radius + 2 * math.pi / 3 * self.classes
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + 0.01 * torch.randn(rows, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.points[row], self.classes[row]
