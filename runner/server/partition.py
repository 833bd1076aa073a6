"""Which server holds which part of the parameters: equal contiguous pieces of all parameters one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Piece:
    """The elements from `start` to `stop` of the flattened parameter `name`."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Shard = tuple[Piece, ...]
"""What one server holds, in one flat tensor: at most one piece of each parameter."""


def partition(elements: Mapping[str, int], servers: int) -> tuple[Shard, ...]:
    """The pieces of each server, in the order of the parameters; those of the servers follow one another.

    Args:
        elements: the number of elements of every parameter, in order.
        servers: at most as many as there are elements.
    """
    total = sum(elements.values())
    cuts = [total * server // servers for server in range(servers + 1)]
    shards: list[list[Piece]] = [[] for _ in range(servers)]
    first = 0
    for name, count in elements.items():
        for server, (begin, end) in enumerate(pairwise(cuts)):
            start, stop = max(begin - first, 0), min(end - first, count)
            if start < stop:
                shards[server].append(Piece(name, start, stop))
        first += count
    return tuple(map(tuple, shards))


def size(shard: Shard) -> int:
    """Its elements."""
    return sum(piece.size for piece in shard)
