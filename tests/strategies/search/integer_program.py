"""The optimum of a cost graph by a mixed-integer program: an independent algorithm on the same costs."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds as Range
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array

from strategies.cost.cluster import Cluster
from strategies.cost.problem import Problem
from strategies.cost.resharding_matrix import ReshardingCosts
from strategies.search.cost_graph import CostGraph
from strategies.search.elimination import Elimination, FactorGraph
from strategies.search.strategy_space import StrategySpace


def evaluated(problem: Problem, cluster: Cluster) -> FactorGraph:
    """The graph with exact costs around its optimum, built again: each solution evaluates the costs that it uses."""
    graph = CostGraph(problem, StrategySpace(problem, ReshardingCosts(problem.mesh, cluster)))
    elimination = Elimination(dict(enumerate(graph.factors.sizes)), graph.factors.factors)
    while graph.evaluate([index for _, index in sorted(elimination.solve()[0].items())]):
        pass
    return graph.factors


def integer_optimum(graph: FactorGraph) -> float:
    """The optimum by scipy.optimize.milp: a binary per option, and one per pair of options of every table over two."""
    starts = np.cumsum([0, *graph.sizes])
    costs, rows, columns, entries, wanted = [np.zeros(starts[-1])], [], [], [], []
    count = starts[-1]

    def equation(places: list[int], values: list[float], right: float) -> None:
        rows.extend([len(wanted)] * len(places))
        columns.extend(places)
        entries.extend(values)
        wanted.append(right)

    for variable, size in enumerate(graph.sizes):
        equation(list(range(starts[variable], starts[variable] + size)), [1.0] * size, 1.0)
    for one in graph.factors:
        if len(one.variables) == 1:
            costs[0][starts[one.variables[0]] :][: len(one.seconds)] += one.seconds
            continue
        a, b = one.variables
        seconds = np.where(np.isfinite(one.seconds), one.seconds, 1e3)
        costs.append(seconds.ravel())
        index = np.arange(count, count + seconds.size).reshape(seconds.shape)
        count += seconds.size
        for option in range(seconds.shape[0]):
            equation([*index[option], int(starts[a] + option)], [1.0] * seconds.shape[1] + [-1.0], 0.0)
        for option in range(seconds.shape[1]):
            equation([*index[:, option], int(starts[b] + option)], [1.0] * seconds.shape[0] + [-1.0], 0.0)
    matrix = coo_array((entries, (rows, columns)), shape=(len(wanted), count)).tocsr()
    scale = 1e3  # milliseconds: the solver's tolerances are absolute
    kinds = np.zeros(count)
    kinds[: starts[-1]] = 1
    found = milp(
        np.concatenate(costs) * scale,
        constraints=LinearConstraint(matrix, wanted, wanted),
        bounds=Range(0, 1),
        integrality=kinds,
        options={"mip_rel_gap": 0.0},
    )
    assert found.success
    return float(found.fun / scale)
