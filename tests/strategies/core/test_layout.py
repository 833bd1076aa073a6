"""Layouts map ranks to blocks: blocks tile the tensor, once per replica."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh


@st.composite
def placed(draw):
    """(mesh, layout, shape) that fit."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    axes = draw(st.permutations(mesh.names))
    rank = draw(st.integers(0, 3))
    places = [draw(st.sampled_from([None, "partial", *range(rank)])) for _ in axes]
    dims = tuple(tuple(a for a, place in zip(axes, places, strict=True) if place == d) for d in range(rank))
    partial = frozenset(a for a, place in zip(axes, places, strict=True) if place == "partial")
    layout = Layout(dims, partial)
    shape = tuple(count * draw(st.integers(1, 3)) for count in layout.counts(mesh))
    return mesh, layout, shape


def within(block):
    return tuple(slice(*bounds) for bounds in block)


@given(placed())
def test_blocks_tile_the_tensor_once_per_replica(case):
    mesh, layout, shape = case
    replicas = np.zeros(shape, dtype=int)
    for rank in range(mesh.size):
        replicas[within(layout.block(shape, mesh, rank))] += 1
    assert (replicas == mesh.product(layout.replica_axes(mesh))).all()


@given(placed())
def test_blocks_have_the_local_shape(case):
    mesh, layout, shape = case
    local = layout.local_shape(shape, mesh)
    assert math.prod(local) * math.prod(layout.counts(mesh)) == math.prod(shape)
    for rank in range(mesh.size):
        assert tuple(stop - start for start, stop in layout.block(shape, mesh, rank)) == local


@given(placed())
def test_replica_groups_hold_the_same_block(case):
    mesh, layout, shape = case
    blocks = [layout.block(shape, mesh, rank) for rank in range(mesh.size)]
    for rank in range(mesh.size):
        same = [peer for peer in range(mesh.size) if blocks[peer] == blocks[rank]]
        assert sorted(layout.replica_group(mesh, rank)) == same


@given(placed())
def test_size_one_axes_never_matter(case):
    mesh, layout, shape = case
    plain = Layout(tuple(tuple(a for a in dim if mesh.sizes[a] > 1) for dim in layout.dims))
    for rank in range(mesh.size):
        assert layout.block(shape, mesh, rank) == plain.block(shape, mesh, rank)
    assert layout.replica_axes(mesh) == plain.replica_axes(mesh)


@given(placed())
def test_partial_says_nothing_about_blocks(case):
    mesh, layout, shape = case
    assert layout.reduced.partial == frozenset()
    assert layout.reduced.block(shape, mesh, 0) == layout.block(shape, mesh, 0)
    assert layout.reduced.reduced == layout.reduced


def test_order_inside_a_dim_is_major_to_minor():
    """("mp", ("sp", "dp")) on [dp, sp, mp]: the slices a0..a3 of the first row block are on ranks 0, 4, 2, 6."""
    mesh = Mesh((("dp", 2), ("sp", 2), ("mp", 2)))
    layout = Layout((("mp",), ("sp", "dp")))
    holders = {layout.block((2, 4), mesh, rank): rank for rank in range(8)}
    assert [holders[((0, 1), (i, i + 1))] for i in range(4)] == [0, 4, 2, 6]
    assert [holders[((1, 2), (i, i + 1))] for i in range(4)] == [1, 5, 3, 7]


def test_devices_left_over_come_last():
    """((2, 4), (4, 1)) on 8 devices is [2, 4, 1]: ranks 0-3 hold the first row block and reduce among themselves."""
    mesh = Mesh((("m", 2), ("k", 4)))
    rows = Layout((("m",), ("k",)))
    assert [rows.block((2, 4), mesh, rank)[0] for rank in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert mesh.groups(["k"]) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_an_axis_is_used_once():
    with pytest.raises(StrategyError, match="axis a more than once"):
        Layout((("a",), ("a",)))
    with pytest.raises(StrategyError, match="axis b more than once"):
        Layout((("b",),), frozenset("b"))


def test_dims_that_do_not_divide():
    mesh, layout = Mesh((("a", 4),)), Layout(((), ("a",)))
    assert layout.local_shape((4, 6), mesh) == (4, 2)
    assert [layout.block((4, 6), mesh, rank)[1] for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 6)]
    assert [layout.block((4, 7), mesh, rank)[1] for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    layout.check_even((4, 8), mesh)
    with pytest.raises(StrategyError, match=r"Dim 1 of a tensor of shape \(4, 6\) cannot be cut into 4"):
        layout.check_even((4, 6), mesh)


def test_text():
    assert str(Layout((("a", "b"), ()), frozenset("dc"))) == "(a*b, -) partial over c*d"
    assert str(Layout.replicated(2)) == "(-, -)"
