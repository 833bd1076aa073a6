"""The strategy of operators without a configured one: data parallel, the batch dim sharded over all devices, or over
as many as fit. A view, or what takes sections apart, takes the layout of its base where that sends less."""

from __future__ import annotations

from math import prod

from strategies.core.graph import Operator, Ref
from strategies.core.layout import Layout
from strategies.core.mesh_refinement import Meshing
from strategies.cost.problem import Problem
from strategies.resharding.path import path_elements, resharding_path
from strategies.rules.sharding import Assignment

VIEWS = frozenset("_unsafe_view flatten reshape unflatten view".split())
PARTS = frozenset(
    """
    _embedding_bag chunk embedding_bag narrow slice split split_with_sizes tensor_split unsafe_chunk unsafe_split
    unsafe_split_with_sizes
    """.split()
)
"""Operators whose results may have fewer rows in the place of the batch."""


def divisors(number: int) -> list[int]:
    """Every divisor, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def largest_fit(size: int, world_size: int) -> int:
    """The largest divisor of `world_size` that divides `size`."""
    return max(n for n in divisors(world_size) if size % n == 0)


def batch_factors(problem: Problem) -> dict[str, str]:
    """Per operator, by id, the factor of the dim that carries the batch, where there is one: dim 0 of every input.

    Where an operator replicates that dim (or has no rule), a result carries the batch on: a view in the dim that
    contains its rows; others in the same dim, with the same number of rows, a multiple (batches are joined) or a part.
    """
    return problem.once("batch factors", lambda: _batch_factors(problem))


def _batch_factors(problem: Problem) -> dict[str, str]:
    graph = problem.graph
    dims = {Ref(source.id): 0 for source in graph.of_kind("input") if source.spec.shape}
    found: dict[str, str] = {}
    for operator in graph.operators:
        sharding = problem.shardings[operator.id]
        carried = [
            (position, dims[ref], graph.specs[ref].shape)
            for position, ref in enumerate(operator.operands)
            if ref in dims
        ]
        factors = [factor for position, dim, _ in carried if (factor := sharding.operands[position][dim]) is not None]
        if factors:
            found[operator.id] = factors[0]
        for index, (result, spec) in enumerate(zip(sharding.results, operator.results, strict=True)):
            if factors:
                same = [dim for dim, factor in enumerate(result) if factor == factors[0]]
            else:
                places = [_carried_on(operator, dim, shape, spec.shape) for _, dim, shape in carried]
                same = [dim for dim in places if dim is not None]
            if same:
                dims[Ref(operator.id, index)] = same[0]
    return found


def _carried_on(operator: Operator, dim: int, shape: tuple[int, ...], result: tuple[int, ...]) -> int | None:
    """The dim of a result with the rows of dim `dim` of an operand, which the operator replicates; None if there is
    none."""
    rows = shape[dim]
    if operator.op in VIEWS:
        first, last = prod(shape[dim + 1 :]), prod(shape[dim:])
        reached = (prod(result[at + 1 :]) < last and first < prod(result[at:]) for at in range(len(result)))
        return next((at for at, found in enumerate(reached) if found), None)
    if dim >= len(result) or not rows:
        return None
    fits = operator.op in PARTS or result[dim] == rows or (result[dim] % rows == 0 and len(result) == len(shape))
    return dim if fits and result[dim] else None


def batch_parallel(problem: Problem, meshing: Meshing, operator: Operator) -> Assignment:
    """The default of one operator; without a batch dim it runs on replicated tensors."""
    factor = batch_factors(problem).get(operator.id)
    if factor is None:
        return {}
    count = largest_fit(problem.shardings[operator.id].sizes[factor], problem.mesh.size)
    (axes,) = meshing.place([count], where=operator.where)
    return {factor: axes} if axes else {}


def as_shown(problem: Problem, operator: Operator, have: Layout, default: Assignment) -> Assignment:
    """The assignment of what shows a value with the layout `have`: that layout if it sends less than `default`."""
    sharding, spec = problem.shardings[operator.id], problem.graph.specs[operator.operands[0]]
    dims = list(zip(sharding.operands[0], have.dims, strict=True))
    assignment = {factor: axes for factor, axes in dims if factor is not None and axes}
    kept = all(factor is not None or not axes for factor, axes in dims)
    if not kept or any(sharding.sizes[f] % problem.mesh.product(axes) for f, axes in assignment.items()):
        return default
    mine, other = (
        path_elements(resharding_path(have, sharding.operand_layouts(a)[0], spec.shape, problem.mesh), problem.mesh)
        for a in (assignment, default)
    )
    return assignment if mine < other else default
