"""A parameter with several uses: it is stored in one layout, each use redistributes it and returns its own gradient.

An option is a layout and a set of replica axes over which the gradient is added once per step; every use must leave its
gradient as a sum over such axes only (see lowering, where what is left follows in the same way).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from strategies.core.graph import Operator, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.lowering.lowering import left_axes
from strategies.search.cells import Cell
from strategies.search.options import Choices, Menu
from strategies.search.transfers import Rows, Seconds, Transfers


class SharedParameter:
    """`layouts` per option; tables `own` and, per use, `uses` [options, options of the user] if those are priced."""

    def __init__(
        self, menu: Menu, source: Source, uses: Sequence[tuple[Operator, int, bool]], choices: Mapping[str, Choices]
    ) -> None:
        self.transfers, self.spec, mesh = menu.transfers, source.spec, menu.problem.mesh
        learns = any(gradient for _, _, gradient in uses)
        asked = [(choices[user.id].wanted[place].rows, user.id in menu.problem.fixed) for user, place, _ in uses]
        options_of = [one for one, fixed in asked if fixed] or [one for one, _ in asked]
        layouts = dict.fromkeys(self.transfers.layout(one, i) for one in options_of for i in range(len(one)))
        options = [
            (layout, frozenset(added))
            for layout in layouts
            for replicas in [layout.replica_axes(mesh) if learns else ()]
            for size in range(len(replicas) + 1)
            for added in combinations(replicas, size)
        ]
        self.layouts = [layout for layout, _ in options]
        own = np.zeros(len(options))
        if learns:
            own = np.array([menu.parameter_seconds(Layout(x.dims, added), source.spec) for x, added in options])
        ref = Ref(source.id)
        per_element = np.array([menu.parameter_bytes(layout, ref) for layout in self.layouts])
        rows = self.transfers.rows_of(self.layouts)
        self.bytes: Seconds = menu.elements(rows, source.spec) * per_element
        self.own = Cell(lambda: own + menu.pressure * self.bytes)
        self.own_seconds: Seconds = own
        share = max(sum(not gradient for _, _, gradient in uses), 1)
        self.parts = [
            _Use(self.transfers, source.spec, mesh, options, choices[user.id], place, gradient, share)
            for user, place, gradient in uses
            if menu.problem.counts(ref)
        ]
        self.uses = [Cell(part.seconds) for part in self.parts]

    def settle(self, option: int, users: Sequence[int]) -> None:
        """Prices what a solution uses."""
        for part, user in zip(self.parts, users, strict=False):
            part.settle(option, user)

    def cost(self, option: int, users: Sequence[int]) -> float:
        """Seconds of a solution whose prices are settled: uses without a gradient pay once for what they share."""
        total, paid = float(self.own_seconds[option]), {}
        for part, cell, user in zip(self.parts, self.uses, users, strict=False):
            seconds = float(cell.seconds[option, user])
            if part.returned is None:
                wanted = part.wanted.rows
                paid[wanted.dims[part.wanted.of_option[user]].tobytes()] = seconds * part.share
            else:
                total += seconds
        return total + sum(paid.values())

    def refresh(self) -> None:
        for cell in self.uses:
            cell.refresh()


class _Use:
    """One use of a parameter. Those without a gradient share what they want in common: each pays a part."""

    def __init__(
        self,
        transfers: Transfers,
        spec: TensorSpec,
        mesh: Mesh,
        options: Sequence[tuple[Layout, frozenset[str]]],
        choices: Choices,
        place: int,
        gradient: bool,
        share: int,
    ) -> None:
        self.transfers, self.spec, self.share = transfers, spec, share
        self.wanted, self.returned = choices.wanted[place], choices.returned[place] if gradient else None
        names = list(dict.fromkeys(layout for layout, _ in options))
        places = {layout: place for place, layout in enumerate(names)}
        self.stored, self.of_option = transfers.rows_of(names), [places[layout] for layout, _ in options]
        self.back: list[tuple[Rows, Rows]] = []
        self.forbidden: list[list[bool]] = []
        for column in range(len(self.returned.rows) if self.returned is not None else 0):
            assert self.returned is not None
            layout = transfers.layout(self.returned.rows, column)
            left = {have: left_axes(have, layout, spec.shape, mesh) for have in names}
            after = transfers.rows_of([Layout(have.dims, left[have]) for have in names])
            self.back.append((transfers.rows_of([layout]), after))
            self.forbidden.append([not left[have] <= added for have, added in options])

    def seconds(self) -> Seconds:
        found = self.transfers.seconds(self.stored, self.wanted.rows, self.spec)
        found = found[np.array(self.of_option)[:, None], self.wanted.of_option]
        if self.returned is None:
            return np.asarray(found / self.share)
        columns = []
        for (before, after), forbidden in zip(self.back, self.forbidden, strict=True):
            seconds = self.transfers.seconds(before, after, self.spec, few=0)[0, self.of_option]
            columns.append(np.where(forbidden, np.inf, seconds))
        return np.asarray(found + np.stack(columns, 1)[:, self.returned.of_option])

    def settle(self, option: int, user: int) -> None:
        wanted = int(self.wanted.of_option[user])
        self.transfers.settle(self.stored, self.wanted.rows, self.spec, self.of_option[option], wanted)
        if self.returned is not None:
            before, after = self.back[int(self.returned.of_option[user])]
            self.transfers.settle(before, after, self.spec, 0, self.of_option[option])
