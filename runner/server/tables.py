"""A table on a worker: the rows that a slice needs, pulled by id, and a cache of rows of earlier slices.

The module computes with the rows alone, and with positions among them in place of ids. Invariant: what a slice computes
with is what its servers hold, cached or not: a worker sends the version of each cached row, and the server sends the
rows that have changed since.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.planning.slices import Table
from runner.server.flat_parameters import wide
from runner.server.gradients import Rows


class PulledTable:
    """The rows of `table` that the slice at hand needs, as the values of `parameter`.

    Args:
        bounds: the first row of every server, and the one behind its last.
        cached: how many rows are kept, those of the slice at hand included; 0: no cache.
    """

    def __init__(self, table: Table, parameter: Tensor, bounds: Sequence[tuple[int, int]], cached: int) -> None:
        self._table, self._parameter, self._bounds, self._limit = table, parameter, bounds, cached
        self._ids = self._cached = torch.empty(0, dtype=torch.int64)
        self._values = torch.empty(0, table.width, dtype=parameter.dtype)
        self._cached_values, self._versions = self._values, self._cached
        parameter.data = self._values  # the entire table is on no worker

    def need(self, loaded: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Need the rows that the entries of all micro-batches name. Returns the positions that stand for their ids, by
        micro-batch and entry."""
        named = [[entries[position] for position in self._table.entries] for entries in loaded]
        self._ids = torch.unique(torch.cat([ids.reshape(-1) for entries in named for ids in entries]))
        if len(self._ids) and not 0 <= int(self._ids[0]) <= int(self._ids[-1]) < self._table.rows:
            raise IndexError(f"an id is outside of the {self._table.rows} rows of {self._table.name}")
        self._values = torch.empty(len(self._ids), self._table.width, dtype=self._parameter.dtype)
        self._new_versions = torch.zeros(len(self._ids), dtype=torch.int64)
        return [[torch.searchsorted(self._ids, ids) for ids in entries] for entries in named]

    def _part(self, shard: int) -> slice:
        """The needed rows that a server holds: a contiguous part."""
        first, last = torch.searchsorted(self._ids, torch.tensor(self._bounds[shard])).tolist()
        return slice(first, last)

    def request(self, shard: int) -> tuple[Tensor, Tensor]:
        """What a server is requests for: rows, counted from its first, and the versions that are cached."""
        ids = self._ids[self._part(shard)]
        if not self._limit:
            return ids - self._bounds[shard][0], ids[:0]
        place, known = self._find(ids)
        versions = torch.where(known, self._versions[place], -1) if len(self._cached) else torch.full_like(ids, -1)
        return ids - self._bounds[shard][0], versions

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the cache in which `ids` are, and whether they are there."""
        place = torch.searchsorted(self._cached, ids).clamp(max=max(len(self._cached) - 1, 0))
        known = self._cached[place] == ids if len(self._cached) else torch.zeros_like(ids, dtype=torch.bool)
        return place, known

    def receive(self, shard: int, version: int, positions: Tensor, values: Tensor) -> None:
        """Take what a server has sent."""
        part = self._part(shard)
        own = self._values[part]
        self._new_versions[part] = version
        if not self._limit:
            own.copy_(values)
            return
        place, known = self._find(self._ids[part])
        if len(self._cached):
            own[known] = self._cached_values[place[known]]
        own[positions] = values

    def begin(self) -> None:
        """All rows are there: the module computes with them from now on."""
        self._parameter.data = self._values
        self._parameter.grad = torch.zeros_like(self._values)
        self._total = self._parameter.grad.to(wide(self._values.dtype))
        if self._limit:
            others = (~torch.isin(self._cached, self._ids)).nonzero().view(-1)
            room = max(self._limit - len(self._ids), 0)
            kept = others[torch.argsort(self._versions[others], descending=True, stable=True)[:room]]  # used last
            ids = torch.cat([self._cached[kept], self._ids])
            order = torch.argsort(ids)
            self._cached_values = torch.cat([self._cached_values[kept], self._values])[order]
            self._versions = torch.cat([self._versions[kept], self._new_versions])[order]
            self._cached = ids[order]

    def collect(self) -> None:
        """Add the gradient of the micro-batch that has just run backward."""
        assert self._parameter.grad is not None
        if self._total is not self._parameter.grad:
            self._total += self._parameter.grad
            self._parameter.grad.zero_()

    @property
    def gradients(self) -> Tensor:
        """The gradient of the rows, of all micro-batches, in fp32 or wider."""
        if self._table.padding is not None:
            self._total[self._ids == self._table.padding] = 0
        return self._total

    def gradient(self, shard: int) -> Rows:
        """The gradient for a server, whose rows count from its first."""
        part = self._part(shard)
        return Rows(self._ids[part] - self._bounds[shard][0], self.gradients[part])
