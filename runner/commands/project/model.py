"""The model: plain torch. Nothing in it knows of devices."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Classifies points of the plane.

    Args:
        width: entries of the hidden layers.
        classes: how many classes there are.
    """

    def __init__(self, width: int = 64, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        """Points [rows, 2] to scores [rows, classes]."""
        hidden = self.first(points).relu()
        return self.last(hidden + self.second(hidden).relu())
