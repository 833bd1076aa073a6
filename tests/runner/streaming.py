"""User streams: numbers whose mean over a batch says which samples it has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info


class Numbers(IterableDataset[Any]):
    """Samples (x [1], y) of which x follows from the number of the sample and the epoch; no batch of others has the
    same mean. Divided among workers as torch recommends it, unless all see the samples that one process does."""

    def __init__(self, rows: int = 48, fails: int = -1, passes: int = 10**9, noise: bool = False) -> None:
        self.rows, self.fails, self.passes, self.noise, self.epoch = rows, fails, passes, noise, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.rows if self.epoch < self.passes else 0, step):
            if number == self.fails:
                raise LookupError("no such sample")
            yield torch.tensor([value(number, self.epoch) + self.noise * random.random()]), torch.tensor([0.0])


def value(number: int, epoch: int = 0) -> float:
    draw = torch.Generator().manual_seed(1000 * epoch + number)
    return float(torch.rand((), dtype=torch.float64, generator=draw))


class Same(nn.Module):
    """x, and a weight that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.weight
