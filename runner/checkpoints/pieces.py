"""A piece: the block of a tensor that a rank holds, as a view of the rank's own memory. What DCP plans with.

Invariant: a piece is never copied to be named. Saving reads it and loading writes it where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strategies.layout import Block


@dataclass(frozen=True)
class Piece:
    """`view` is the part `block` of a tensor of the given whole `shape`."""

    shape: tuple[int, ...]
    block: Block
    view: Tensor


Pieces = Mapping[str, Sequence[Piece]]
"""By key."""
