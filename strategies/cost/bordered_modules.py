"""The layouts of a trainer of DTensors that moves values where modules receive and return them.

Over the axes that slice modules a value is laid out anew at a border; everywhere else operators take it as it comes:
a partial sum is added up, a replicated value is sliced as another operand of the operator is, and a sliced one is
gathered where the operator cannot compute on it or another operand is sliced otherwise. The set is a little larger than
that of the plans that are possible (of several operands, one must bring the slices), so it bounds them from below.
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


@dataclass(frozen=True)
class BorderedModules(ModuleLayouts):
    """What a trainer with borders allows in one graph.

    Attributes:
        borders: of a value and a user, by id, between which there is one.
        size: of the axes together.
    """

    borders: frozenset[tuple[Ref, str]]
    size: int

    def use(self, user: Operator, position: int) -> tuple[frozenset[int], frozenset[int]] | None:
        """Over which dims the user may slice a value that comes replicated, and gather one that comes sliced; None at a
        border: any."""
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
        gathered = {dim for dim, factor in enumerate(own) if others or factor is None or not self._fits(user, factor)}
        return frozenset(sliced), frozenset(gathered)

    def penalty(self, given: Sequence[Layout], wanted: Sequence[Layout], use: Any) -> Seconds:
        have = np.array([self.place(layout) for layout in given])[:, None]
        want = np.array([self.place(layout) for layout in wanted])[None, :]
        if use is None:
            return np.zeros(np.broadcast_shapes(have.shape, want.shape))
        sliced, gathered = (np.array(sorted(dims), dtype=np.int64) for dims in use)
        taken = (have == want) | ((have == PARTIAL) & (want == REPLICATED))
        taken |= np.isin(want, sliced) & ((have < 0) | np.isin(have, gathered))
        taken |= (want == REPLICATED) & np.isin(have, gathered)
        return np.where(taken, 0.0, FORBIDDEN)

    def _fits(self, operator: Operator, factor: str) -> bool:
        return self.shardings[operator.id].fits(factor, self.size)

    def _brings_slices(self, ref: Ref) -> bool:
        """Buffers and constants are replicated."""
        node = self.graph.by_id[ref.id]
        return not isinstance(node, Source) or node.kind in ("parameter", "input")

    def _may_slice(self, operator: Operator, factor: str) -> bool:
        return any(factor in dims for dims in self.shardings[operator.id].operands)
