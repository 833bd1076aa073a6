"""The mesh as arithmetic: coordinates, groups, and the algebra of device matrices."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh, accumulate, common_refinement, differences, primes

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
)


@st.composite
def mesh_and_axes(draw):
    mesh = draw(meshes)
    return mesh, draw(st.lists(st.sampled_from(mesh.names), unique=True))


@st.composite
def device_matrices(draw, count):
    """Matrices of the same number of devices."""
    factors = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=5))

    def matrix():
        order = draw(st.permutations(factors))
        cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1)))) if len(order) > 1 else []
        bounds = [0, *cuts, len(order)]
        return tuple(math.prod(order[a:b]) for a, b in pairwise(bounds))

    return [matrix() for _ in range(count)]


@given(meshes)
def test_rank_is_the_row_major_coordinate(mesh):
    coordinates = [tuple(mesh.coordinate(rank, axis) for axis in mesh.names) for rank in range(mesh.size)]
    assert coordinates == sorted(coordinates)
    assert len(set(coordinates)) == mesh.size
    for rank, coordinate in enumerate(coordinates):
        assert rank == sum(i * mesh.strides[axis] for i, axis in zip(coordinate, mesh.names, strict=True))
        assert rank == mesh.index(rank, mesh.names)


@given(mesh_and_axes())
def test_groups_partition_the_ranks(pair):
    mesh, axes = pair
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert {len(group) for group in groups} == {mesh.product(axes)}
    others = mesh.others(axes)
    for group in groups:
        assert len({tuple(mesh.coordinate(rank, axis) for axis in others) for rank in group}) == 1


@given(mesh_and_axes())
def test_a_group_is_in_the_order_of_its_slices(pair):
    mesh, axes = pair
    for rank in range(mesh.size):
        group = mesh.group(rank, axes)
        assert [mesh.index(peer, axes) for peer in group] == list(range(mesh.product(axes)))
        assert group[mesh.index(rank, axes)] == rank


@given(mesh_and_axes())
def test_axes_in_mesh_order(pair):
    mesh, axes = pair
    both = (*mesh.sorted(axes), *mesh.others(axes))
    assert sorted(both) == sorted(name for name, size in mesh.axes if size > 1)
    assert mesh.sorted(reversed(axes)) == mesh.sorted(axes)


def test_groups_of_a_cube():
    mesh = Mesh((("dp", 2), ("sp", 2), ("mp", 2)))
    assert mesh.groups(["mp"]) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(["dp"]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.group(5, ["sp", "dp"]) == (1, 5, 3, 7)


@pytest.mark.parametrize("axes", [(("a", 2), ("a", 2)), (("a", 0),)])
def test_impossible_meshes(axes):
    with pytest.raises(StrategyError, match="a"):
        Mesh(axes)


@given(st.lists(st.integers(1, 9), max_size=6))
def test_differences_undo_accumulate(matrix):
    assert differences(accumulate(matrix)) == tuple(matrix)
    assert accumulate(matrix)[-1:] == ((math.prod(matrix),) if matrix else ())


@given(device_matrices(1))
def test_refinement_is_idempotent(matrices):
    (matrix,) = matrices
    assert common_refinement(matrix, matrix) == common_refinement(matrix) == tuple(n for n in matrix if n > 1)


@given(device_matrices(3))
def test_refinement_is_commutative_and_associative(matrices):
    a, b, c = matrices
    assert common_refinement(a, b) == common_refinement(b, a)
    ab = common_refinement(a, b)
    if ab is not None:
        assert common_refinement(ab, c) == common_refinement(a, b, c)


@given(device_matrices(2))
def test_refinement_refines_both_and_is_the_coarsest(matrices):
    found = common_refinement(*matrices)
    points = set().union(*map(accumulate, matrices)) - {1}
    if found is None:
        ordered = sorted(points)
        assert any(b % a for a, b in pairwise(ordered))
    else:
        assert set(accumulate(found)) == points


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ((1,), (1, 1), ()),
        ((8, 4), (2, 16), (2, 4, 4)),
        ((2, 4), (4, 2), (2, 2, 2)),
        ((8,), (2, 2, 2), (2, 2, 2)),
        ((3, 8), (8, 3), None),
    ],
)
def test_refinements_that_are_known(a, b, both):
    assert common_refinement(a, b) == both


@given(st.integers(1, 5000))
def test_primes(number):
    found = primes(number)
    assert math.prod(found) == number
    assert list(found) == sorted(found)
    assert all(p % d for p in found for d in range(2, math.isqrt(p) + 1))
