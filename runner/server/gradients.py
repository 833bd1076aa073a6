"""The gradient of a shard: one flat tensor for all dense pieces, and of each table the rows that a batch has used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """`values` [n, width] of the rows `ids` [n], which are sorted and different."""

    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Gradient:
    """`dense` [elements of the dense pieces]; `tables` in the order of the shard's tables."""

    dense: Tensor
    tables: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Gradient:
        """The gradient of which `tensors` are the tensors."""
        pairs = zip(tensors[1::2], tensors[2::2], strict=True)
        return cls(tensors[0], tuple(Rows(ids, values) for ids, values in pairs))

    def tensors(self) -> list[Tensor]:
        """The tensors that carry this gradient: dense, then ids and values of every table."""
        return [self.dense, *(tensor for rows in self.tables for tensor in (rows.ids, rows.values))]

    def times(self, scale: float) -> Gradient:
        """This gradient times a number."""
        if scale == 1.0:
            return self
        return Gradient(self.dense * scale, tuple(Rows(rows.ids, rows.values * scale) for rows in self.tables))

    def square(self) -> float:
        """The sum of all squares."""
        parts = (self.dense, *(rows.values for rows in self.tables))
        return sum(float(part.double().square().sum()) for part in parts)


def added(gradients: Sequence[Gradient]) -> Gradient:
    """The sum, in the order of `gradients`."""
    dense = gradients[0].dense.clone()
    for one in gradients[1:]:
        dense += one.dense
    return Gradient(dense, tuple(_added(rows) for rows in zip(*(one.tables for one in gradients), strict=True)))


def _added(parts: Sequence[Rows]) -> Rows:
    ids = torch.unique(torch.cat([part.ids for part in parts]))
    values = parts[0].values.new_zeros((len(ids), *parts[0].values.shape[1:]))
    for part in parts:
        values[torch.searchsorted(ids, part.ids)] += part.values
    return Rows(ids, values)
