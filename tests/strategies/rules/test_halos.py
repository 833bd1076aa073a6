"""Sliced dims of pictures: every slice fetches the rows of others that its windows need."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from strategies.core.graph import OperatorGraph, Ref
from strategies.core.layout import Layout, WindowLayout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import Redistribute
from strategies.core.steps import EXCHANGE, Step
from strategies.lowering.lowering import local_instructions, lower
from strategies.rules import rule_of
from strategies.runtime.simulate import Simulation, assemble, carry, shard
from strategies.runtime.transfer import Transfer
from tests.fuzz.pool import Pool, Rejected

MESH = Mesh((("a", 2), ("b", 3), ("c", 2)))
AXES = [("a",), ("b",), ("c",), ("a", "b"), ("c", "a"), ("b", "c"), ("a", "b", "c")]
MOST = {1: 36, 2: 14, 3: 8}
"""Rows of a dim, by the number of dims."""


def convolution(pool: Pool, shape, kernel, stride, *, kind: str) -> Ref:
    draw, count = pool.rng.randint, len(shape)
    groups, each, more = draw(1, 2), draw(1, 2), draw(1, 2)
    dilation = [draw(1, 3) for _ in shape]
    padding = [draw(0, d * k) for d, k in zip(dilation, kernel, strict=True)]
    batch = (draw(1, 2),) if pool.rng.random() < 0.8 else ()
    filters = (groups * each, more) if kind == "transposed" else (groups * more, each)
    numbers = partial(torch.randn, dtype=torch.float64, generator=pool.generator)
    x = pool.source(numbers(*batch, groups * each, *shape), True)
    weight = pool.source(numbers(*filters, *kernel) / 4, True)
    bias = pool.source(numbers(groups * more), True) if pool.rng.random() < 0.7 else None
    if kind == "same":
        given = [1] * count, "same", dilation, groups
        return pool.emit(f"aten.conv{count}d.padding", x, weight, bias, *given)
    if kind == "transposed":
        extra = [draw(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        overload = "default" if count == 1 else "input"
        given = stride, padding, extra, groups, dilation
        return pool.emit(f"aten.conv_transpose{count}d.{overload}", x, weight, bias, *given)
    return pool.emit(f"aten.conv{count}d.default", x, weight, bias, stride, padding, dilation, groups)


def pooling(pool: Pool, shape, kernel, stride, *, kind: str) -> Ref:
    draw, count = pool.rng.randint, len(shape)
    x = _picture(pool, shape)
    padding, ceil_mode = [draw(0, k // 2) for k in kernel], pool.rng.random() < 0.3
    if kind == "average":
        given = kernel, stride, padding, ceil_mode, pool.rng.random() < 0.5
        divisor = (3,) if count > 1 and pool.rng.random() < 0.2 else ()
        return pool.emit(f"aten.avg_pool{count}d.default", x, *given, *divisor)
    dilation = [draw(1, 2) for _ in shape]
    name = f"aten.max_pool{count}d{'_with_indices' if kind == 'indices' else ''}.default"
    return pool.call(name, x, kernel, stride, padding, dilation, ceil_mode)[0]


def adaptive(pool: Pool, shape, kernel, stride, *, kind: str) -> Ref:
    count = len(shape)
    x = _picture(pool, [size * k for size, k in zip(shape, kernel, strict=True)])
    places = [1 if pool.rng.random() < 0.3 else size for size in shape]
    return pool.call(f"aten.adaptive_{kind}_pool{count}d.default", x, places)[0]


def padded(pool: Pool, shape, kernel, stride, *, kind: str) -> Ref:
    least = 0 if kind == "reflect" else -1
    most = min(shape) - 1 if kind == "reflect" else 5
    widths = [pool.rng.randint(min(least, most), min(most, 5)) for _ in range(2 * len(shape))]
    if kind == "constant":
        return pool.emit("aten.constant_pad_nd.default", _picture(pool, shape), widths, 0.5)
    return pool.emit("aten.pad.default", _picture(pool, shape), widths, kind)


def interpolated(pool: Pool, shape, kernel, stride, *, kind: str) -> Ref:
    count = len(shape)
    names = {"linear": ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]}
    op = names[kind][count - 1] if kind in names else f"{kind}{count}d"
    corners = [pool.rng.random() < 0.5] if kind == "linear" else []
    if pool.rng.random() < 0.5:
        factors = [pool.rng.choice((0.5, 0.7, 1.0, 1.5, 2.0, 3.0)) for _ in shape]
        return pool.emit(f"aten.{op}.vec", _picture(pool, shape), None, *corners, factors)
    places = [max(1, size * k // s) for size, k, s in zip(shape, kernel, stride, strict=True)]
    scales = [pool.rng.choice((None, n / size)) for n, size in zip(places, shape, strict=True)]
    return pool.emit(f"aten.{op}.default", _picture(pool, shape), places, *corners, *scales)


def _picture(pool: Pool, shape) -> Ref:
    return pool.source(torch.randn(2, 1, *shape, dtype=torch.float64, generator=pool.generator), True)


KINDS = {kind: partial(convolution, kind=kind) for kind in ("plain", "same", "transposed")}
KINDS |= {kind: partial(pooling, kind=kind) for kind in ("max", "average", "indices")}
KINDS |= {f"adaptive {kind}": partial(adaptive, kind=kind) for kind in ("avg", "max")}
KINDS |= {f"padding, {kind}": partial(padded, kind=kind) for kind in ("constant", "reflect", "replicate")}
KINDS |= {kind: partial(interpolated, kind=kind) for kind in ("linear", "upsample_nearest", "_upsample_nearest_exact")}


def random_case(rng: random.Random, kind: str) -> tuple[Pool, OperatorGraph, dict[str, tuple[str, ...]]]:
    """An operator over windows and a legal assignment that slices dims of its picture."""
    while True:
        count = rng.choice((1, 1, 2, 2, 3))
        sliced: dict[int, tuple[str, ...]] = {}
        for dim in rng.sample(range(count), rng.randint(1, count)):
            free = [axes for axes in AXES if not {axis for some in sliced.values() for axis in some} & set(axes)]
            if free:
                sliced[dim] = rng.choice(free)
        slices = [MESH.product(sliced.get(dim, ())) for dim in range(count)]
        shape = [n * rng.randint(1, max(1, MOST[count] // n)) - rng.choice((0, 0, 0, 1, 2)) for n in slices]
        kernel, stride = [rng.randint(1, 5) for _ in shape], [rng.randint(1, 4) for _ in shape]
        if min(shape) < 1:
            continue
        pool = Pool(rng)
        try:
            result = KINDS[kind](pool, shape, kernel, stride)
        except Rejected:
            continue
        weights = torch.randn(pool.values[result].shape, dtype=torch.float64, generator=pool.generator)
        weighed = pool.emit("aten.mul.Tensor", result, pool.source(weights, False))
        graph = pool.graph([weighed, *(Ref(result.id, 1) for _ in pool.operators[0].results[1:])])
        sharding = rule_of(graph.operators[0], graph)
        spatial = sharding.operands[0][-count:]
        assignment = {spatial[dim]: axes for dim, axes in sliced.items() if spatial[dim] is not None}
        if len(assignment) == len(sliced) and sharding.legal(assignment, MESH):
            return pool, graph, assignment


def differences(kind: str, seed: int) -> list[str]:
    """Results and gradients that are not those of one device."""
    pool, graph, assignment = random_case(random.Random(seed), kind)
    values = {source.name: pool.values[Ref(source.id)] for source in graph.sources}
    operators = {o.name: OperatorPlan({}, "configured", None) for o in graph.operators}
    operators[graph.operators[0].name] = OperatorPlan(assignment, "configured", None)
    layouts = {s.name: Layout.replicated(len(s.spec.shape)) for s in graph.sources}
    inputs = {s.name: layouts[s.name] for s in graph.sources if s.kind == "input"}
    simulation = Simulation(lower(graph, Plan(MESH, operators, inputs, layouts)), values)
    wrong, found = [], simulation.run()
    for ref, results in zip(graph.outputs, found, strict=True):
        want = pool.values[ref]
        wrong += [f"rank {rank}" for rank, got in enumerate(results) if not torch.allclose(got, want, 1e-11, 1e-11)]
    simulation.backward([result.sum() for result in found[0]])
    leaves = {s.name: values[s.name].clone().requires_grad_() for s in graph.sources if s.trainable}
    tensors = {s.id: leaves.get(s.name, values[s.name]) for s in graph.sources}
    alone = Simulation(lower(graph, _alone(graph)), {s.name: tensors[s.id].detach() for s in graph.sources})
    alone.backward([alone.run()[0][0].sum()])
    for name, gradient in alone.gradients().items():
        got = simulation.gradients()[name]
        wrong += [] if torch.allclose(got, gradient, 1e-11, 1e-11) else [f"gradient of {name}"]
    return [f"{kind} {seed}: {graph.operators[0]} {assignment}: {wrong}"] if wrong else []


def _alone(graph: OperatorGraph) -> Plan:
    """One device."""
    operators = {o.name: OperatorPlan({}, "configured", None) for o in graph.operators}
    layouts = {s.name: Layout.replicated(len(s.spec.shape)) for s in graph.sources}
    return Plan(Mesh(()), operators, {s.name: layouts[s.name] for s in graph.sources if s.kind == "input"}, layouts)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_pictures_are_the_operator(kind):
    assert not [line for seed in range(20) for line in differences(kind, seed)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(10))
def test_many_slices_of_pictures_are_the_operator(kind, part):
    """5,100 convolutions, and 1,000 cases of every other operator."""
    count = 170 if kind in ("plain", "same", "transposed") else 100
    assert not [line for seed in range(count * part, count * part + count) for line in differences(kind, 1000 + seed)]


def test_bytes_of_halos():
    """A rank sends the rows next to its neighbours, in both directions, and backward the gradients of these rows: as
    many as are predicted."""
    pool = Pool(random.Random(0))
    x, weight = (
        pool.source(torch.randn(1, 2, 12, 5).double(), True),
        pool.source(torch.randn(3, 2, 5, 3).double(), True),
    )
    graph = pool.graph([pool.emit("aten.conv2d.default", x, weight, None, [1, 1], [2, 1])])
    (operator,) = graph.operators
    mesh = Mesh((("rows", 4),))
    instructions = local_instructions(operator, rule_of(operator, graph), {"s0": ("rows",)}, graph, mesh)
    (halo,) = [one for one in instructions if isinstance(one, Redistribute)]
    row = 2 * 5
    for (step,) in (halo.forward, halo.backward):
        assert [step.elements(mesh, rank) for rank in range(4)] == [2 * row, 4 * row, 4 * row, 2 * row]
        assert step.busiest(mesh) == 4 * row
    for rank in range(4):
        transfer = Transfer(halo.forward, mesh, rank)
        packed, _ = transfer.pack([torch.zeros(1, 2, 3, 5)])
        assert transfer.sent([], packed) == halo.forward[0].elements(mesh, rank)


def test_the_busiest_rank_of_windows_is_found_without_their_blocks():
    """Of any windows on either side, over axes of any order, some of which slice nothing before."""
    draw = np.random.default_rng(0)

    def layout(mesh, shape, sliding):
        dims = [[] for _ in (*shape, 0)]
        for axis in draw.permutation(mesh.names):
            dims[draw.integers(len(dims))].append(str(axis))
        dims = tuple(map(tuple, dims[:-1]))
        windows = []
        for axes, size in zip(dims, shape, strict=True):
            count = mesh.product(axes)
            starts = [max(0, i * size // count - int(draw.integers(3))) for i in range(count)]
            stops = [min(size, (i + 1) * size // count + int(draw.integers(3))) for i in range(count)]
            windows.append(tuple(zip(starts, stops, strict=True)) if count > 1 and draw.random() < 0.7 else ())
        return WindowLayout(dims, windows=tuple(windows)) if sliding else Layout(dims)

    for _ in range(150):
        mesh = Mesh(tuple((f"a{i}", int(draw.integers(2, 4))) for i in range(draw.integers(1, 4))))
        shape = tuple(int(draw.integers(2, 30)) for _ in range(draw.integers(1, 4)))
        first, second = [(True, False), (False, True), (True, True)][draw.integers(3)]
        before, after = layout(mesh, shape, first), layout(mesh, shape, second)
        step = Step(EXCHANGE, mesh.names, 0, 0, before, after, shape)
        assert step.busiest(mesh) == max(step.elements(mesh, rank) for rank in range(mesh.size)), step


def test_gradients_of_overlapping_rows_are_added():
    mesh, shape = Mesh((("r", 3),)), (6,)
    own, wanted = Layout((("r",),)), WindowLayout((("r",),), windows=(((0, 4), (1, 5), (5, 6)),))
    there, back = (Step(EXCHANGE, ("r",), 0, 0, *ends, shape) for ends in ((own, wanted), (wanted, own)))
    rows = torch.arange(6.0) + 1
    (got,) = carry([(there,)], [shard(rows, own, mesh)], mesh)
    assert [piece.tolist() for piece in got] == [[1, 2, 3, 4], [2, 3, 4, 5], [6, 0, 0, 0]]
    (added,) = carry([(back,)], [got], mesh)
    assert assemble(added, own, shape, mesh).tolist() == [1, 4, 6, 8, 5, 6]


@pytest.mark.parametrize(
    ("assignment", "dtype"), [({"s0": ("a",)}, "bfloat16"), ({"s0": ("a",), "i": ("c",)}, "float32")]
)
def test_halos_are_counted_as_they_are_sent(assignment, dtype):
    """In fp32 where channels are summed over ranks."""
    pool = Pool(random.Random(0))
    x, weight = (pool.source(torch.randn(shape).bfloat16(), True) for shape in ((1, 2, 12, 5), (3, 2, 3, 3)))
    graph = pool.graph([pool.emit("aten.conv2d.default", x, weight, None, [1, 1], [1, 1])])
    (operator,) = graph.operators
    layouts = {s.name: Layout.replicated(4) for s in graph.sources}
    inputs = {s.name: layouts[s.name] for s in graph.sources if s.kind == "input"}
    plan = Plan(MESH, {operator.name: OperatorPlan(assignment, "configured", None)}, inputs, layouts)
    program = lower(graph, plan)
    halos = [one for one in program.instructions if isinstance(one, Redistribute) and one.id.endswith("_windows")]
    assert [halo.spec.dtype for halo in halos] == [dtype]


def _on_slices(graph: OperatorGraph, assignment, values) -> list[torch.Tensor]:
    """The results of a graph of one operator, on every rank of `MESH`."""
    operators = {o.name: OperatorPlan(assignment, "configured", None) for o in graph.operators}
    layouts = {s.name: Layout.replicated(len(s.spec.shape)) for s in graph.sources}
    inputs = {s.name: layouts[s.name] for s in graph.sources if s.kind == "input"}
    return Simulation(lower(graph, Plan(MESH, operators, inputs, layouts)), values).run()[0]


def test_integer_pictures():
    """Maxima over rows outside of a picture of integers are less than all integers."""
    pool = Pool(random.Random(0))
    picture = torch.randint(-9, 0, (1, 1, 7, 5), generator=pool.generator)
    result = pool.emit("aten.max_pool2d.default", pool.source(picture), [3, 3], [1, 1], [1, 1])
    graph = pool.graph([result])
    (source,) = graph.sources
    for got in _on_slices(graph, {"w0": ("a", "c"), "w1": ("b",)}, {source.name: picture}):
        assert torch.equal(got, pool.values[result])


def test_windows_outside_of_the_picture_leave_nothing_infinite():
    """The last slice of a maximum pooling has places that do not exist; a product with zero would make them NaN."""
    pool = Pool(random.Random(0))
    x = pool.source(torch.randn(1, 1, 10, 2, generator=pool.generator).double(), True)
    graph = pool.graph([pool.emit("aten.max_pool2d.default", x, [1, 1], [1, 1])])
    (operator,) = graph.operators
    instructions = local_instructions(operator, rule_of(operator, graph), {"w0": ("c", "a")}, graph, MESH)
    assert [one.target for one in instructions][-1] == "local.framed"


@pytest.mark.parametrize(("rows", "slices", "fits"), [(510, 4, True), (512, 4, True), (5, 4, False), (6, 4, False)])
def test_rows_that_do_not_divide(rows, slices, fits):
    """Both the rows of the operand and those of the result must leave no slice empty."""
    pool = Pool(random.Random(0))
    x, weight = (pool.source(torch.zeros(1, 1, size, 1).double(), True) for size in (rows + 2, 3))
    graph = pool.graph([pool.emit("aten.conv2d.default", x, weight, None)])
    sharding = rule_of(graph.operators[0], graph)
    assert sharding.fits("s0", slices) is fits
    assert sharding.lengths["s0"] == {rows, rows + 2} and sharding.size_of("s0") == f"{rows + 2} and {rows}"
