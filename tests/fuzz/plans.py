"""Random meshes and random legal plans: any axes on any factor, in any order, padded slices where rules allow them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from strategies.core.graph import OperatorGraph
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.rules import rule_of
from strategies.rules.sharding import Sharding

SHAPES = ((2,), (4,), (8,), (2, 2), (2, 2, 2), (6,), (12,), (2, 3), (3, 2), (2, 4), (3, 4), (2, 6), (2, 2, 3))
WEIGHTS = (6, 4, 2, 6, 4, 3, 1, 4, 3, 2, 1, 1, 1)
"""Small meshes more often: they find the same mistakes in less time."""


def random_mesh(rng: random.Random) -> Mesh:
    (shape,) = rng.choices(SHAPES, WEIGHTS)
    return Mesh(tuple(zip("abc", shape, strict=False)))


def _spread(rng: random.Random, fits: Sequence[Callable[[int], bool]], mesh: Mesh) -> list[tuple[str, ...]]:
    """Per place the axes that slice it; most axes slice something."""
    places: list[tuple[str, ...]] = [() for _ in fits]
    for axis, size in rng.sample(mesh.axes, len(mesh.axes)):
        possible = [i for i, fit in enumerate(fits) if fit(size * mesh.product(places[i]))]
        if possible and rng.random() < 0.85:
            place = rng.choice(possible)
            places[place] = (*places[place], axis)
    return places


def random_assignment(rng: random.Random, sharding: Sharding, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """A legal strategy of one operator."""

    def fits(factor: str) -> Callable[[int], bool]:
        return lambda count: sharding.fits(factor, count)

    places = _spread(rng, [fits(factor) for factor in sharding.factors], mesh)
    return {factor: axes for factor, axes in zip(sharding.factors, places, strict=True) if axes}


def random_layout(rng: random.Random, shape: Sequence[int], mesh: Mesh, uneven: bool) -> Layout:
    """A layout without partial sums; with `uneven` also of slices that do not divide, none of them empty."""

    def fits(size: int) -> Callable[[int], bool]:
        return lambda count: size % count == 0 or (uneven and -(-size // count) * (count - 1) < size)

    return Layout(tuple(_spread(rng, [fits(size) for size in shape], mesh)))


def random_plan(rng: random.Random, graph: OperatorGraph, mesh: Mesh) -> Plan:
    """A random strategy on every operator, random layouts of batch entries and parameters, and of the results of a
    quarter of the operators. Constants are replicated, as in every plan."""
    operators = {}
    for operator in graph.operators:
        outputs = None
        if rng.random() < 0.25:
            outputs = tuple(random_layout(rng, spec.shape, mesh, rng.random() < 0.3) for spec in operator.results)
        assignment = random_assignment(rng, rule_of(operator, graph), mesh)
        operators[operator.name] = OperatorPlan(assignment, "configured", outputs)
    inputs, tensors = {}, {}
    for source in graph.sources:
        layout = random_layout(rng, source.spec.shape, mesh, rng.random() < 0.3)
        if source.kind == "input":
            inputs[source.name] = layout
        else:
            stored = layout if source.kind == "parameter" else Layout.replicated(len(source.spec.shape))
            tensors[source.name] = stored
    return Plan(mesh, operators, inputs, tensors)
