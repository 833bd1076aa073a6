"""The smallest network worth sharding: two matrix products with a relu in between."""

from __future__ import annotations

from torch import Tensor, nn

from .matmul import MatMul


class Net(nn.Module):
    """[batch, 32] -> matmul -> relu -> matmul2 -> [batch, 16], without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = MatMul(32, 16)
        self.relu = nn.ReLU()
        self.matmul2 = MatMul(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.matmul2(self.relu(self.matmul(x)))
        return out
