"""Which server holds which part of the parameters: equal contiguous pieces of all dense parameters one after the other,
and equal contiguous rows of every table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Piece:
    """The elements from `start` to `stop` of the flattened parameter `name`; of a table complete rows of `width`."""

    name: str
    start: int
    stop: int
    width: int | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of a table that these are."""
        assert self.width is not None
        return self.start // self.width, self.stop // self.width


@dataclass(frozen=True)
class ServerShard:
    """What one server holds: at most one piece of each parameter, those of `dense` in one flat tensor."""

    dense: tuple[Piece, ...]
    tables: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*self.dense, *self.tables)

    @property
    def size(self) -> int:
        """The elements of the dense pieces."""
        return sum(piece.size for piece in self.dense)


def partition(elements: Mapping[str, int], tables: Mapping[str, int], servers: int) -> tuple[ServerShard, ...]:
    """The shards of all servers, whose dense pieces follow one another.

    Args:
        elements: the number of elements of every parameter, in order.
        tables: the width of those that are tables.
    """
    dense: list[list[Piece]] = [[] for _ in range(servers)]
    total = sum(count for name, count in elements.items() if name not in tables)
    first = 0
    for name, count in elements.items():
        if name in tables:
            continue
        for server, (begin, end) in enumerate(pairwise(_cuts(total, servers))):
            start, stop = max(begin - first, 0), min(end - first, count)
            if start < stop:
                dense[server].append(Piece(name, start, stop))
        first += count
    rows = [
        tuple(
            Piece(name, begin * width, end * width, width)
            for name, width in tables.items()
            for begin, end in [_cuts(elements[name] // width, servers)[server : server + 2]]
        )
        for server in range(servers)
    ]
    return tuple(ServerShard(tuple(pieces), own) for pieces, own in zip(dense, rows, strict=True))


def kept_by_workers(elements: Mapping[str, int]) -> ServerShard:
    """All of the parameters that workers keep, each of which has them complete."""
    return ServerShard(tuple(Piece(name, 0, count) for name, count in elements.items()))


def _cuts(total: int, parts: int) -> list[int]:
    return [total * part // parts for part in range(parts + 1)]
