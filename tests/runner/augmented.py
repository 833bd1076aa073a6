"""User datasets that draw random numbers, change the order of their keys, or differ on one rank."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from networks import Points
from torch.utils.data import Dataset


class Augmented(Points):
    """Points with noise from all three global generators; odd rows have their keys in another order."""

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        noise = torch.randn(x.shape) + random.gauss(0, 1) + float(np.random.randn())
        return {"label": y, "x": x + noise} if index % 2 else {"x": x + noise, "label": y}


class OfRank(Dataset[Any]):
    """Points that have `less` rows fewer, or other values, on rank 2."""

    def __init__(self, rows: int = 64, less: int = 0, shift: float = 0.0) -> None:
        odd = os.environ.get("RANK") == "2"
        self.points = Points(rows - less * odd)
        self.points.x += shift * odd

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        return self.points[index]


def halves(samples: list[Any]) -> Any:
    """A collate function that merges every two rows into one."""
    return torch.stack([x for x, _ in samples])[::2], torch.tensor([y for _, y in samples])[::2]
