"""Resharding paths in closed form: they reach the target, never beat the engine's search, and mostly equal it."""

from __future__ import annotations

import random

import pytest

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost.collectives import resharding_seconds
from strategies.cost.resharding_estimate import direct_path, estimated_seconds
from strategies.resharding.path import path_elements, resharding_path
from tests.strategies.search.problems import all_layouts, node, nodes

MESH, SHAPE = Mesh((("a", 2), ("b", 2), ("c", 2))), (8, 8, 8)


def pairs() -> list[tuple[Layout, Layout]]:
    """A sample of all pairs of layouts over three axes."""
    before, after = all_layouts(3, "abc", True), all_layouts(3, "abc", False)
    every = [(x, y) for x in before for y in after]
    return random.Random(0).sample(every, 1500)


@pytest.mark.slow
def test_every_chain_leads_to_its_target_and_never_beats_the_engine() -> None:
    for before, after in pairs():
        found = direct_path(before, after, SHAPE, MESH)
        now = before
        for step in found:
            assert step.before == now
            now = step.after
        assert now == after
        assert path_elements(found, MESH) >= path_elements(resharding_path(before, after, SHAPE, MESH), MESH)


def test_a_change_of_one_axis_costs_as_much_as_in_the_engine() -> None:
    """The layouts of one round and the next differ in the dim of one axis: there no detour helps, except where the
    order of axes in a dim changes too."""
    machine = node(8)
    for place in all_layouts(2, "ab", False):
        for before in all_layouts(2, "c", True):
            for after in all_layouts(2, "c", False):
                ends = [
                    Layout(tuple(x + y for x, y in zip(place.dims, last.dims, strict=True)), last.partial)
                    for last in (before, after)
                ]
                total = (*ends, (64, 64), 4, MESH, machine)
                assert estimated_seconds(*total) == pytest.approx(resharding_seconds(*total)), f"{ends[0]} -> {ends[1]}"


def test_sixteen_thousand_ranks_are_no_more_work_than_two() -> None:
    axes = tuple((f"d{i}", 2) for i in range(14))
    mesh, names = Mesh(axes), tuple(name for name, _ in axes)
    before, after = Layout((names[:11], (), ())), Layout((names[:10], (), names[10:]))
    assert estimated_seconds(before, after, (2048, 8192, 16384), 2, mesh, nodes(2048)) > 0
    assert [step.kind for step in direct_path(before, after, (2048, 8192, 16384), mesh)] == ["all_to_all", "slice"]
