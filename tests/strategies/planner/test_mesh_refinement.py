"""One mesh for everything that a request names: refinement, names, and which axes counts get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.mesh_refinement import Meshing, merged, meshing
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.request import NamedMatrix

CUBE = NamedMatrix((2, 2, 2), ("dp", "sp", "mp"))
LINE = NamedMatrix((8,), ("tp",))


def ranks(built: Meshing, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks along `axes`, from rank 0: identifies the axes independently of their names."""
    return built.mesh.group(0, axes)


def test_open_mesh_is_row_major_in_the_order_of_the_counts() -> None:
    built = meshing(8, None, {}, [(2, 4, 1)])
    rows, contraction, columns = built.place((2, 4, 1))
    assert ranks(built, rows) == (0, 4)
    assert ranks(built, contraction) == (0, 1, 2, 3)
    assert columns == ()
    # (1, 1), (1, 2) on 8: two slices of columns, the devices left over innermost
    built = meshing(8, None, {}, [(1, 1, 2)])
    assert ranks(built, built.place((1, 1, 2))[2]) == (0, 4)


@pytest.mark.parametrize("counts", [((3, 8), (8, 3)), ((8, 3), (3, 8))])
def test_open_mesh_takes_counts_that_have_no_common_refinement(counts: tuple[tuple[int, int], ...]) -> None:
    built = meshing(24, None, {}, counts)
    first, second = (built.place(count) for count in counts)
    for count, axes in zip(counts, (first, second), strict=True):
        assert tuple(map(built.mesh.product, axes)) == count
        assert len({axis for part in axes for axis in part}) == sum(map(len, axes))
    assert ranks(built, first[0]) == tuple(range(0, 24, 24 // counts[0][0]))  # the first one keeps its order


@given(st.integers(1, 64), st.data())
def test_open_mesh_can_place_any_counts_that_divide(world: int, data: st.DataObject) -> None:
    def counts() -> list[int]:
        left, found = world, []
        for _ in range(data.draw(st.integers(0, 3))):
            found.append(data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
            left //= found[-1]
        return found

    requested = [counts(), counts(), counts()]
    built = meshing(world, None, {}, requested)
    assert built.mesh.size == world
    for wanted in requested:
        axes = built.place(wanted)
        assert list(map(built.mesh.product, axes)) == wanted
        flat = [axis for part in axes for axis in part]
        assert len(set(flat)) == len(flat)


def test_named_mesh_gives_the_first_run_of_unused_axes() -> None:
    built = meshing(16, (("pp", 2), ("dp", 2), ("tp", 4)), {}, [])
    assert built.mesh.names == ("pp", "dp", "tp.0", "tp.1")
    assert built.place((4,)) == (("pp", "dp"),)
    assert built.place((2, 4)) == (("pp",), ("tp.0", "tp.1"))
    assert built.place((4, 4)) == (("pp", "dp"), ("tp.0", "tp.1"))
    assert built.place((8,)) == (("dp", "tp.0", "tp.1"),)
    assert built.place((16, 1)) == (("pp", "dp", "tp.0", "tp.1"), ())
    # no run of complete axes is left: the first axis that can be split
    assert built.place((2, 2, 2)) == (("pp",), ("dp",), ("tp.0",))
    assert built.place((2,), taken=("pp", "dp")) == (("tp.0",),)
    with pytest.raises(
        StrategyError, match=r"^here: the mesh of 16 devices \(2 x 2 x 2 x 2\) has no unused axes that make 4 slices"
    ):
        built.place((4,), taken=("pp", "tp.0", "tp.1"), where="here")


def test_named_mesh_splits_an_axis_of_two_primes() -> None:
    built = meshing(12, (("dp", 2), ("tp", 6)), {}, [])
    assert built.place((3,)) == (("tp.1",),)
    assert built.place((6,)) == (("tp.0", "tp.1"),)
    assert built.place((4, 3)) == (("dp", "tp.0"), ("tp.1",))


def test_layouts_and_mesh_live_together() -> None:
    built = meshing(8, (("d", 4), ("t", 2)), {"cube": CUBE, "line": LINE}, [])
    assert built.mesh.axes == (("d.0", 2), ("d.1", 2), ("t", 2))
    assert built.named["cube"] == {"dp": ("d.0",), "sp": ("d.1",), "mp": ("t",)}
    assert built.named["line"] == {"tp": ("d.0", "d.1", "t")}
    assert built.fixed == (("d.0", "d.1"), ("t",))


def test_layouts_without_a_named_mesh_refine() -> None:
    built = meshing(8, None, {"line": LINE, "cube": CUBE}, [])
    assert built.mesh.names == ("tp.0", "tp.1", "tp.2")
    assert built.named["cube"] == {"dp": ("tp.0",), "sp": ("tp.1",), "mp": ("tp.2",)}
    wide = meshing(32, None, {"a": NamedMatrix((8, 4), ("x", "y")), "b": NamedMatrix((2, 16), ("u", "v"))}, [])
    assert [wide.mesh.product(wide.named["b"][axis]) for axis in "uv"] == [2, 16]
    assert wide.named["b"]["v"] == (*wide.named["a"]["x"][1:], *wide.named["a"]["y"])


def test_explicit_matrices_without_a_common_refinement() -> None:
    layouts = {
        "a": NamedMatrix((2, 12), ("x", "y")),
        "b": NamedMatrix((4, 6), ("u", "v")),
        "c": NamedMatrix((3, 8), ("s", "t")),
    }
    with pytest.raises(
        StrategyError, match=r"^parallel.layouts.a \(2, 12\) and parallel.layouts.c \(3, 8\) have no common refinement"
    ):
        meshing(24, None, layouts, [])
    with pytest.raises(
        StrategyError, match=r"^parallel.mesh \(3, 8\) and parallel.layouts.b \(4, 6\) have no common refinement"
    ):
        meshing(24, (("x", 3), ("y", 8)), {"b": layouts["b"]}, [])


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (NamedMatrix((2, 3), ("a", "b")), r"parallel.layouts.odd \(2, 3\) has 6 devices, but world_size is 8"),
        (NamedMatrix((2, 4), ("a", "a")), "must name each of the 2 axes"),
        (NamedMatrix((2, 4), ("a",)), "must name each of the 2 axes"),
        (NamedMatrix((2, 4), ("a", "b", "c")), "must name each of the 2 axes"),
        (NamedMatrix((-2, -4), ("a", "b")), "has an axis of size -4"),
        (NamedMatrix((), ()), r"\(\) has 1 devices, but world_size is 8"),
    ],
)
def test_wrong_matrices(matrix: NamedMatrix, text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        meshing(8, None, {"odd": matrix}, [])


def plan_on(built: Meshing, *runs: tuple[str, ...]) -> Plan:
    operators = {f"op{i}": OperatorPlan({"d0": run}, "configured") for i, run in enumerate(runs)}
    return Plan(built.mesh, operators, {"0": Layout((runs[0], ()))}, {})


def merged_axes(built: Meshing, *runs: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return merged(plan_on(built, *runs), built.boundaries()).mesh.axes


def test_merged_mesh_is_as_coarse_as_the_plan_allows() -> None:
    built = meshing(16, None, {}, [])
    a, b, c, d = built.mesh.names
    assert merged_axes(built, (a, b, c, d)) == (("d0", 16),)
    assert merged_axes(built, (a, b)) == (("d0", 4), ("d1", 4))
    assert merged_axes(built, (a, b), (b,)) == (("d0", 2), ("d1", 2), ("d2", 4))
    assert merged_axes(built, (b, a), (c, d)) == (
        ("d0", 2),
        ("d1", 2),
        ("d2", 4),
    )  # an order other than the mesh's is kept
    plan = merged(plan_on(built, (a, b), (c, d)))
    assert plan.operators["op1"].assignment == {"d0": ("d1",)}
    assert plan.inputs["0"] == Layout((("d0",), ()))
    assert merged(plan) == plan


def test_merged_mesh_keeps_the_names_of_users() -> None:
    built = meshing(16, (("dp1", 2), ("dp0", 4), ("d", 2)), {}, [])
    assert merged_axes(built, built.mesh.names) == (("dp1", 2), ("dp0", 4), ("d", 2))
    first, split, rest, last = built.mesh.names
    assert merged_axes(built, (first, split), (rest, last)) == (("dp1", 2), ("dp0.0", 2), ("dp0.1", 2), ("d", 2))
    data_parallel = meshing(8, None, {}, [], spare="dp")
    assert merged_axes(data_parallel, data_parallel.mesh.names) == (("dp", 8),)
    one = meshing(1, (("dp", 1),), {}, [])
    assert merged(Plan(one.mesh, {}, {}, {}), one.boundaries()).mesh == Mesh((("d0", 1),))
