"""The strategy of operators that nobody configured: the dim that carries the batch over all devices, or over as
many as fit."""

from __future__ import annotations

from strategies.graph import Operator
from strategies.meshing import Meshing
from strategies.rules.sharding import Assignment
from strategies.search.problem import Problem


def divisors(number: int) -> list[int]:
    """Every divisor, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def largest_fit(size: int, world_size: int) -> int:
    """The largest divisor of `world_size` that divides `size`."""
    return max(n for n in divisors(world_size) if size % n == 0)


def batch_parallel(problem: Problem, meshing: Meshing, operator: Operator) -> Assignment:
    """The default of one operator; without a dim that carries the batch it runs on whole tensors."""
    factor = problem.batch_factors.get(operator.id)
    if factor is None:
        return {}
    count = largest_fit(problem.shardings[operator.id].sizes[factor], problem.mesh.size)
    (axes,) = meshing.place([count], where=operator.where)
    return {factor: axes} if axes else {}
