"""A described machine: which levels of it a group of ranks crosses."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh
from tests.strategies.machines import GPU, NODE, cluster


def test_a_group_crosses_the_levels_of_its_axes() -> None:
    mesh, nodes = Mesh((("dp", 4), ("tp", 8))), cluster(4, 8)
    assert nodes.spread(mesh, ["tp"]) == (1, 8)
    assert nodes.spread(mesh, ["dp"]) == (4, 1)
    assert nodes.spread(mesh, ["dp", "tp"]) == (4, 8)
    assert nodes.link(mesh, ["tp"]) == GPU
    assert nodes.link(mesh, ["dp"]) == NODE
    assert nodes.link(mesh, []) == GPU


def test_an_axis_may_straddle_levels() -> None:
    mesh, nodes = Mesh((("dp", 2), ("tp", 16))), cluster(4, 8)
    assert nodes.spread(mesh, ["tp"]) == (2, 8)
    assert nodes.spread(Mesh((("a", 16), ("b", 2))), ["a"]) == (4, 4)


def test_a_mesh_smaller_than_the_cluster_has_the_innermost_devices() -> None:
    assert cluster(4, 8).spread(Mesh((("x", 8),)), ["x"]) == (1, 8)
    assert cluster(4, 8).spread(Mesh((("x", 12),)), ["x"]) == (2, 6)


def test_units_that_do_not_divide_count_the_worst_group() -> None:
    mesh = Mesh((("a", 4), ("b", 3)))  # the second group of three has ranks on both nodes
    assert cluster(2, 8).spread(mesh, ["b"])[0] == 2


@pytest.mark.parametrize("sizes", [(2, 2, 4), (4, 8), (16,)])
def test_the_spread_is_that_of_the_ranks_themselves(sizes: tuple[int, ...]) -> None:
    machine = cluster(*sizes)
    for shape in ((2, 2, 2, 2), (4, 4), (2, 8), (16,), (8, 2)):
        if math.prod(shape) != machine.devices:
            continue
        mesh = Mesh(tuple((f"x{i}", size) for i, size in enumerate(shape)))
        for count in range(1, len(shape) + 1):
            for axes in combinations(mesh.names, count):
                group, found, inner = mesh.group(0, axes), [], machine.devices
                before = 1
                for size in sizes:
                    inner //= size
                    units = len({rank // inner for rank in group})
                    found.append(units // before)
                    before = units
                assert machine.spread(mesh, axes) == tuple(found)
                assert math.prod(found) == len(group)


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"described has 8 devices .* needs 16"):
        cluster(8).link(Mesh((("x", 16),)), ["x"])


def test_a_dtype_that_is_not_listed_computes_like_fp32() -> None:
    assert cluster(8).peak("bfloat16") == 4e14
    assert cluster(8).peak("float64") == 5e12
    assert cluster(8).peak("complex64") == 1e13
