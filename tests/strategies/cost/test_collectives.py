"""Seconds of collectives: by algorithm, size, group and level."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from strategies.cost.cluster import HIERARCHICAL, RING, TREE, Level, Link
from strategies.cost.collectives import collective_seconds, path_seconds, step_seconds
from strategies.resharding.path import resharding_path
from tests.strategies.machines import GPU, NODE, cluster

MESH = Mesh((("dp", 4), ("tp", 8)))
MACHINE = cluster(4, 8)


def test_a_ring_takes_its_steps_and_its_bytes() -> None:
    ring = replace(MACHINE, algorithms=(RING,))
    one_way = 7 * GPU.latency + 7e6 / GPU.bandwidth
    assert collective_seconds(ALL_GATHER, 7e6, ("tp",), MESH, ring) == pytest.approx(GPU.call + one_way)
    assert collective_seconds(ALL_REDUCE, 14e6, ("tp",), MESH, ring) == pytest.approx(GPU.call + 2 * one_way)
    assert collective_seconds(ALL_GATHER, 0, (), MESH, ring) == 0


def test_the_slowest_level_crossed_sets_the_pace() -> None:
    inside, across = (collective_seconds(ALL_GATHER, 1e8, (axis,), MESH, MACHINE) for axis in ("tp", "dp"))
    assert inside == pytest.approx(1e8 / GPU.bandwidth, rel=0.1)
    assert across == pytest.approx(1e8 / NODE.bandwidth, rel=0.1)


def test_a_ring_over_nodes_uses_the_links_of_all_members() -> None:
    both = collective_seconds(ALL_GATHER, 1e9, ("dp", "tp"), MESH, replace(MACHINE, algorithms=(RING,)))
    assert both == pytest.approx(1e9 / min(GPU.bandwidth, 8 * NODE.bandwidth), rel=0.05)


def test_the_algorithm_follows_from_the_size() -> None:
    def seconds(sent: float, *algorithms: str) -> float:
        return collective_seconds(ALL_REDUCE, sent, ("dp", "tp"), MESH, replace(MACHINE, algorithms=algorithms))

    assert seconds(1e3, TREE) < seconds(1e3, HIERARCHICAL) < seconds(1e3, RING)
    assert seconds(1e10, RING) < seconds(1e10, TREE)
    assert seconds(1e10, RING) < seconds(1e10, HIERARCHICAL)
    for sent in (1e3, 1e6, 1e10):
        best = min(seconds(sent, one) for one in (RING, TREE, HIERARCHICAL))
        assert seconds(sent, RING, TREE, HIERARCHICAL) == best


def test_a_kind_may_have_a_link_of_its_own() -> None:
    slow = Level("gpu", 8, GPU, {REDUCE_SCATTER: Link(1e9, 0.0)})
    machine = replace(MACHINE, levels=(MACHINE.levels[0], slow))
    assert collective_seconds(REDUCE_SCATTER, 1e9, ("tp",), MESH, machine) == pytest.approx(1.0)
    assert collective_seconds(ALL_GATHER, 1e9, ("tp",), MESH, machine) < 0.01


def test_messages_to_peers_elsewhere_use_the_slow_links() -> None:
    seconds = collective_seconds(ALL_TO_ALL, 31e6, ("dp", "tp"), MESH, MACHINE)
    assert seconds == pytest.approx(NODE.call + 24 * NODE.latency + 7 * GPU.latency + 24e6 / NODE.bandwidth)


def test_a_chain_costs_its_steps() -> None:
    steps = resharding_path(Layout((("dp",), ()), frozenset({"tp"})), Layout(((), ("dp", "tp"))), (64, 64), MESH)
    assert len(steps) > 1
    total = path_seconds(steps, 4, MESH, MACHINE)
    assert total == pytest.approx(sum(step_seconds(step, 4, MESH, MACHINE) for step in steps))
    assert path_seconds((), 4, MESH, MACHINE) == 0


def test_slices_along_an_inner_dim_are_copied() -> None:
    def gather(dims: tuple[tuple[str, ...], ...]) -> float:
        return path_seconds(resharding_path(Layout(dims), Layout(((), ())), (4096, 4096), MESH), 4, MESH, MACHINE)

    copies = MACHINE.launch + 2 * 4096 * 4096 * 4 / MACHINE.memory_bandwidth
    assert gather(((), ("tp",))) - gather((("tp",), ())) == pytest.approx(copies)
