"""The layouts of a trainer of DTensors that moves values where modules receive and return them.

Over the axes that slice modules a value is redistributed at a border; everywhere else operators take it as it comes: a
replicated value is sliced as another operand of the operator is. Where slices would be gathered or moved, or partial
sums reduced, DTensor decides by its own costs, so no plan has that; views of partial sums stay partial sums. The set is
a little larger than that of the plans that are possible (of several operands, one must bring the slices), so it bounds
them from below.
Source: torchtitan.protocols.module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.core.graph import Operator, Ref, Source
from strategies.core.layout import Layout
from strategies.cost.resharding_matrix import PARTIAL, REPLICATED, Seconds
from strategies.cost.styled_modules import FORBIDDEN, ModuleLayouts
from strategies.rules.traits import traits

KEEPING = ("permutation", "reshape")
"""Views that DTensor makes of partial sums."""


@dataclass(frozen=True)
class BorderedModules(ModuleLayouts):
    """What a trainer with borders allows in one graph.

    Attributes:
        borders: of a value and a user, by id, between which there is one.
    """

    borders: frozenset[tuple[Ref, str]]

    def use(self, user: Operator, position: int) -> tuple[frozenset[int], bool] | None:
        """Over which dims the user may slice a value that comes replicated, and whether it is a view, which may take a
        partial sum; None at a border: any."""
        ref, sharding = user.operands[position], self.shardings[user.id]
        if (ref, user.id) in self.borders:
            return None
        others = {
            factor
            for other, (operand, dims) in enumerate(zip(user.operands, sharding.operands, strict=True))
            for factor in dims
            if other != position and factor is not None and self._brings_slices(operand)
        }
        own = sharding.operands[position]
        sliced = {dim for dim, factor in enumerate(own) if factor in others}
        return frozenset(sliced), traits(user.op).result in KEEPING

    def penalty(self, given: Sequence[Layout], wanted: Sequence[Layout], use: Any) -> Seconds:
        have = np.array([self.place(layout) for layout in given])[:, None]
        want = np.array([self.place(layout) for layout in wanted])[None, :]
        if use is None:
            return np.zeros(np.broadcast_shapes(have.shape, want.shape))
        sliced, views = use
        taken = (have == want) | ((have == PARTIAL) & (want == REPLICATED) & views)
        taken |= np.isin(want, np.array(sorted(sliced), dtype=np.int64)) & (have == REPLICATED)
        return np.where(taken, 0.0, FORBIDDEN)

    def _brings_slices(self, ref: Ref) -> bool:
        """Buffers and constants are replicated."""
        node = self.graph.by_id[ref.id]
        return not isinstance(node, Source) or node.kind in ("parameter", "input")

    def _may_slice(self, operator: Operator, factor: str) -> bool:
        return any(factor in dims for dims in self.shardings[operator.id].operands)
