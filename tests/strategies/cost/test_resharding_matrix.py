"""The seconds of many pairs of layouts, against resharding paths one by one."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from strategies.core.graph import TensorSpec
from strategies.core.mesh import Mesh
from strategies.cost import resharding_matrix
from strategies.cost.collectives import path_seconds
from strategies.cost.resharding_matrix import LayoutTable, ReshardingCosts
from strategies.resharding.path import resharding_path
from tests.strategies.search.test_factor_graph import NODES

MESH = Mesh((("a", 2), ("b", 4)))
SPECS = (
    TensorSpec((64, 1024, 512), "bfloat16"),
    TensorSpec((64, 512, 1024), "float32"),
    TensorSpec((64, 6, 512), "bfloat16"),
)


def tables_of(costs: ReshardingCosts) -> tuple[LayoutTable, LayoutTable]:
    """Layouts of tensors of three dims, with partial sums and without."""
    every, not_partial = (np.array(list(product(range(low, 3), repeat=2))) for low in (-2, -1))
    return costs.table(every, 3), costs.table(not_partial, 3)


def exact_seconds(
    costs: ReshardingCosts, before: LayoutTable, after: LayoutTable, spec: TensorSpec, row: int, column: int
) -> float:
    steps = resharding_path(costs.layout(before, row), costs.layout(after, column), spec.shape, costs.mesh)
    return path_seconds(steps, spec.item_bytes, costs.mesh, NODES)


@pytest.mark.parametrize(
    "hashes", [resharding_matrix.pattern_hashes, lambda before, after, kinds: np.zeros((len(before), len(after)), int)]
)
def test_exact_pairs_cost_what_their_paths_cost_and_others_less(
    hashes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resharding_matrix, "pattern_hashes", hashes)  # equal hashes: patterns are compared
    costs, rng = ReshardingCosts(MESH, NODES, at_once=0), random.Random(0)
    before, after = tables_of(costs)
    for spec in SPECS:  # later ones reuse known costs
        costs.seconds(before, after, spec)
        for _ in range(20):
            row, column = rng.randrange(len(before)), rng.randrange(len(after))
            costs.evaluate(before, after, spec, row, column)
    exact = 0
    for spec in SPECS:
        matrix, found = costs._matrices[costs._key(before, after, spec)], costs.seconds(before, after, spec)
        for row, column in product(range(len(before)), range(len(after))):
            real = exact_seconds(costs, before, after, spec, row, column)
            if matrix.exact[row, column]:
                assert found[row, column] == pytest.approx(real, rel=1e-12)
            else:
                assert found[row, column] <= real * (1 + 1e-12)
        exact += int(matrix.exact.sum())
    assert exact > 150


def test_one_exact_pair_makes_all_with_its_pattern_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = TensorSpec((64, 1024, 512), "bfloat16"), TensorSpec((64, 512, 1024), "bfloat16")
    for equal in (-1.0, 1e-6):  # without and with pairs of equal bounds
        monkeypatch.setattr(resharding_matrix, "EQUAL", equal)
        costs = ReshardingCosts(MESH, NODES, at_once=0)
        before, after = tables_of(costs)
        bounds = [costs.seconds(before, after, spec) for spec in (first, second)]
        sliced, other = (
            int(np.flatnonzero((before.dims == dims).all(1) & (before.partial == 0))[0])
            for dims in ([0, 3, 0], [0, 0, 3])
        )
        replicated = int(np.flatnonzero((after.dims == 0).all(1))[0])
        costs.evaluate(before, after, first, sliced, replicated)
        for bound, spec in zip(bounds, (first, second), strict=True):  # dims behind the first have no order
            exact = costs._matrices[costs._key(before, after, spec)].exact
            assert exact[sliced, replicated] and exact[other, replicated]
            same = np.isclose(bound, bound[sliced, replicated], rtol=1e-9)
            line = np.flatnonzero(same[sliced]), np.flatnonzero(same[:, replicated])
            assert (
                (exact.sum() == 2) if equal < 0 else (exact[sliced, line[0]].all() and exact[line[1], replicated].all())
            )
            assert len(line[0]) + len(line[1]) > 2


def test_what_was_too_low_on_one_mesh_is_exact_on_another() -> None:
    spec, known, other = SPECS[0], *(ReshardingCosts(mesh, NODES, 0) for mesh in (MESH, Mesh((("a", 4), ("b", 2)))))
    for costs in (known, other):
        costs.seconds(*tables_of(costs), spec)
    before, after = tables_of(known)
    bounds = known.seconds(before, after, spec)
    for row, column in product(range(0, len(before), 3), range(len(after))):
        known.evaluate(before, after, spec, row, column)
    raised = known.seconds(before, after, spec) > bounds * (1 + 1e-12)
    before, after = tables_of(other)  # the same layouts
    bounds = other.seconds(before, after, spec)
    other.learn(known)
    found, learned = other.seconds(before, after, spec), other._matrices[other._key(before, after, spec)].exact
    assert learned[raised].all() and other.raised and (found > bounds).any() and not learned.all()
    for row, column in np.argwhere(learned & raised).tolist():
        assert found[row, column] == pytest.approx(exact_seconds(other, before, after, spec, row, column), rel=1e-12)


def test_bounds_of_exchanges_are_near_their_seconds() -> None:
    costs = ReshardingCosts(MESH, NODES, at_once=0)
    before, after = tables_of(costs)
    spec = TensorSpec((64, 2048, 4096), "bfloat16")
    low = costs.seconds(before, after, spec)
    real = np.array(
        [[exact_seconds(costs, before, after, spec, i, k) for k in range(len(after))] for i in range(len(before))]
    )
    full = np.ix_(
        *[(one.dims > 0).any(1) & (costs.counts[one.dims].prod(1) == 8) & (one.partial == 0) for one in (before, after)]
    )
    moved = real[full] > 0
    assert moved.sum() > 50 and (low[full] <= real[full] * (1 + 1e-12)).all()
    assert (low[full][moved] / real[full][moved]).mean() > 0.9


def test_an_empty_tensor_has_a_cost() -> None:
    """Half of a head that is rotated as a whole leaves one of no columns."""
    costs, spec = ReshardingCosts(MESH, NODES, at_once=0), TensorSpec((8, 8, 0), "float32")
    before, after = tables_of(costs)
    costs.seconds(before, after, spec)
    for row, column in product(range(len(before)), range(len(after))):
        costs.evaluate(before, after, spec, row, column)
    assert np.isfinite(costs.seconds(before, after, spec)).all()
