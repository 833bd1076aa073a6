"""A parameter with several uses: it is stored in one layout, each use redistributes it and returns its own gradient.

An option is a layout and a set of replica axes over which the gradient is added once per step; every use must leave its
gradient as a sum over such axes only (see lowering, where what is left follows in the same way).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from strategies.engine.lowering import left_axes
from strategies.graph import Operator, Source
from strategies.layout import Layout
from strategies.search.options import Choices, Menu
from strategies.search.transfers import Seconds


class SharedParameter:
    """`layouts` and `own` seconds per option; `uses` [options, options of the user] per use."""

    def __init__(
        self,
        menu: Menu,
        source: Source,
        uses: Sequence[tuple[Operator, int, bool]],
        choices: Mapping[str, Choices],
    ) -> None:
        self.menu, self.spec, self.mesh = menu, source.spec, menu.problem.mesh
        asked = [
            choices[user.id].wanted[position].rows for user, position, _ in uses if user.id in menu.problem.fixed
        ] or [choices[user.id].wanted[position].rows for user, position, _ in uses]
        layouts = dict.fromkeys(menu.transfers.layout(rows, i) for rows in asked for i in range(len(rows)))
        options = [
            (layout, frozenset(added))
            for layout in layouts
            for replicas in [layout.replica_axes(self.mesh) if any(gradient for _, _, gradient in uses) else ()]
            for size in range(len(replicas) + 1)
            for added in combinations(replicas, size)
        ]
        self.layouts = [layout for layout, _ in options]
        rows = menu.transfers.rows_of([Layout(layout.dims, added) for layout, added in options])
        learns = any(gradient for _, _, gradient in uses)
        self.own: Seconds = menu.parameters(rows, self.spec) if learns else np.zeros(len(options))
        self.share = 1.0 / max(sum(not gradient for _, _, gradient in uses), 1)
        """Uses without a gradient share what they want in common: each pays its part."""
        self.uses = [self._use(options, choices[user.id], position, gradient) for user, position, gradient in uses]

    def _use(
        self, options: Sequence[tuple[Layout, frozenset[str]]], choices: Choices, position: int, gradient: bool
    ) -> Seconds:
        transfers, wanted, returned = self.menu.transfers, choices.wanted[position], choices.returned[position]
        stored = transfers.rows_of(self.layouts)
        found = transfers.seconds(stored, wanted.rows, self.spec)[:, wanted.of_option]
        if not gradient:
            return np.asarray(self.share * found)
        back = np.empty((len(options), len(returned.rows)))
        for column in range(len(returned.rows)):
            layout = transfers.layout(returned.rows, column)
            rows = transfers.rows_of([layout])
            left = [left_axes(have, layout, self.spec.shape, self.mesh) for have, _ in options]
            after = transfers.rows_of([Layout(have.dims, kept) for (have, _), kept in zip(options, left, strict=True)])
            seconds = transfers.seconds(rows, after, self.spec)[0]
            allowed = [kept <= added for (_, added), kept in zip(options, left, strict=True)]
            back[:, column] = np.where(allowed, seconds, np.inf)
        return np.asarray(found + back[:, returned.of_option])
