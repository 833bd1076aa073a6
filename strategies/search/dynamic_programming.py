"""Dynamic programming over the operator graph: the plan that costs least, with a certificate, on at most three axes.

problem -> strategy space -> cost graph -> repeated blocks contracted -> elimination -> assignments. Factors hold lower
bounds first: entries that a solution uses are evaluated exactly, and values for which it pays too little are shared,
until the solution costs what the graph says. Each solution is a plan, and each minimum of the graph a lower bound, so
both are known at any time. A graph that is too wide to be eliminated is bounded by message passing, and solved by
reduced-cost fixing.

On an open mesh every factorisation of the ranks into at most three axes that respects the topology is searched. A mesh
of more axes has no exact search: recursive programming takes its place, without a certificate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from strategies.core.gc_paused import gc_paused
from strategies.core.graph import Ref
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.cost.resharding_matrix import ReshardingCosts
from strategies.search.cost_graph import CostGraph
from strategies.search.dual_bound import ReducedCostFixing
from strategies.search.elimination import TooWide
from strategies.search.memory_budget import MemoryBudget, Name, Point
from strategies.search.mesh_choice import (
    MOST_AXES,
    Chosen,
    Coarsened,
    Factorisation,
    choose,
    coarsened,
    factorisations,
    finest,
    least_work,
)
from strategies.search.problem import Problem, Solution
from strategies.search.repeated_blocks import Contraction
from strategies.search.strategy_space import StrategySpace

TOLERANCE = {1: 1e-12, 2: 1e-12, 3: 0.01}
"""Gap at which the search ends, by the axes of a mesh. With a memory limit the gap may stay larger."""
ATTEMPTS = 12
"""Solutions of a wide graph with one bound, and at one multiplier."""
SHARED_EARLY = 3
"""Axes from which on values are shared before all that a solution uses is exact."""


class PlanSearch:
    """The best plan of one problem at one multiplier after another: what was evaluated for one serves the next.

    Args:
        problem: on at most three axes.
        cluster: whose seconds are minimised.
        tolerance: gap at which the search ends; None for that of `TOLERANCE`.
        wide: whether the cost graph is too wide to be eliminated; else that is found out.
        shared: values to share from the beginning in a wide graph.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        tolerance: float | None = None,
        *,
        wide: bool = False,
        shared: frozenset[Ref] = frozenset(),
    ) -> None:
        self.problem, self.wide, self.shared = problem, wide, shared
        self.space = StrategySpace(problem, ReshardingCosts(problem.mesh, cluster))
        self.axes = len(self.space.axes)
        self.tolerance = TOLERANCE[max(self.axes, 1)] if tolerance is None else tolerance
        self.graph = self._build(shared if wide else frozenset())

    def _build(self, shared: frozenset[Ref], like: CostGraph | None = None) -> CostGraph:
        with gc_paused():
            graph = CostGraph(self.problem, self.space, shared, wide=self.wide, like=like)
            factors = graph.factors
            self.solver: Contraction | ReducedCostFixing = (
                ReducedCostFixing(factors, self.tolerance) if self.wide else Contraction(factors)
            )
        return graph

    def solve(self, prove: bool = True) -> tuple[list[int], float]:
        """The candidates of a solution, and seconds that every one costs at least. A wide graph takes long to `prove`
        anything: else its best candidates are compared again, and the bound is the last one."""
        if isinstance(self.solver, ReducedCostFixing) and not prove:
            return self.solver.again()
        try:
            return self.solver.solve()
        except TooWide:
            self.wide = True
            self.graph = self._build(self.shared, self.graph)
            return self.solver.solve()

    def cheapest(self, multiplier: float, tolerance: float, enough: float = math.inf) -> Point:
        """The plan that costs least where a byte costs `multiplier` seconds; its `lower_bound` includes that of its
        bytes. The search stops once no plan costs less than `enough`."""
        most = ATTEMPTS if self.wide and multiplier else math.inf
        self.graph.set_multiplier(multiplier)
        best: Solution | None = None
        named: Mapping[Name, int] = {}
        lower = least = 0.0
        solutions, proven = 0, 1  # the latter: how many there were when the bound was found
        while True:
            indices, bound = self.solve(proven > solutions)
            lower = max(lower, bound)
            raised = self.graph.evaluate(indices)
            cost, size = self.graph.cost(indices), self.graph.bytes(indices)
            if best is None or cost + multiplier * size < least:
                least = cost + multiplier * size
                assignments, tensors = self.graph.assignments(indices), self.graph.tensors(indices)
                best = Solution(assignments, cost, size, lower, tensors, multiplier)
                named = {name: indices[variable] for name, variable in self._variables().items()}
            solutions += 1
            if least - lower <= tolerance * lower or lower >= enough or solutions >= most:
                break
            early = not raised or self.axes >= SHARED_EARLY
            shared = self.graph.underpaid(indices) if early else frozenset()
            if not raised and not shared and proven == solutions:
                break
            if shared:
                self.graph = self._build(self.graph.shared | shared, self.graph)
            if shared or not raised or solutions - proven == ATTEMPTS:
                proven = solutions + 1
        return Point(replace(best, lower_bound=min(lower, least)), named, lower >= enough)

    def evaluated(self, first: Mapping[Name, int], last: Mapping[Name, int], count: int) -> Solution:
        """The plan whose first `count` variables are as in `first`, the others as in `last`; without a bound."""
        indices = [0] * len(self.graph.factors.sizes)  # variables of shared targets are not part of a plan
        variables = self._variables()
        for place, name in enumerate(sorted(variables, key=lambda name: variables[name])):
            indices[variables[name]] = (first if place < count else last)[name]
        self.graph.evaluate(indices)
        assignments, tensors = self.graph.assignments(indices), self.graph.tensors(indices)
        return Solution(assignments, self.graph.cost(indices), self.graph.bytes(indices), 0.0, tensors)

    def _variables(self) -> dict[Name, int]:
        """Those that decide about a plan: graphs number them anew."""
        variables: dict[Name, int] = dict(self.graph.variables.items())
        return variables | {ref: variable for ref, (variable, _) in self.graph.parameters.items()}


def search(problem: Problem, cluster: Cluster, tolerance: float | None = None) -> Solution:
    """The best plan within the problem's memory on its own axes, of which there are at most three.

    Raises:
        TooLarge: no plan within the limit was found.
    """
    found = MemoryBudget(PlanSearch(problem, cluster, tolerance)).within(problem.memory)
    assert found is not None
    return found


class DynamicProgramming:
    """The exact search of one problem, for one memory limit after another.

    Args:
        problem: on its prime axes.
        cluster: whose seconds are minimised.
        meshes: those to search, of at most three axes each.
    """

    def __init__(self, problem: Problem, cluster: Cluster, meshes: Sequence[Coarsened]) -> None:
        self.problem, self.cluster = problem, cluster
        self.meshes = {one.runs: one for one in meshes}
        self.budgets: dict[Factorisation, tuple[PlanSearch, MemoryBudget]] = {}
        self.shared = frozenset[Ref]()
        """Values that wide graphs had to share: a proof without them takes as long as one with them."""
        self.bounds = dict.fromkeys(self.meshes, 0.0)
        if len(meshes) > 1:
            prime = finest(problem.mesh)
            self.bounds |= {runs: least_work(problem, cluster, runs) for runs in self.meshes if runs != prime}

    def within(self, memory: float | None) -> Chosen:
        """The best plan over all meshes within a memory limit in bytes per rank.

        Raises:
            StrategyError: no plan within the limit was found on any mesh.
        """

        def on_mesh(runs: Factorisation, enough: float) -> Solution | None:
            mesh = self.meshes[runs]
            if runs not in self.budgets:
                search = PlanSearch(mesh.problem, self.cluster, shared=self.shared)
                self.budgets[runs] = search, MemoryBudget(search)
            search, budget = self.budgets[runs]
            found = budget.within(memory, enough)
            if search.wide:
                self.shared |= search.graph.shared
            return None if found is None else mesh.refined(found)

        return choose(self.problem.within(memory), self.bounds, on_mesh)


def exact_search(problem: Problem, cluster: Cluster, axes: Sequence[Axes] | None) -> DynamicProgramming | None:
    """The exact search of a problem; None where it would need more than three axes.

    Args:
        problem: on its prime axes.
        cluster: whose seconds are minimised.
        axes: those that a user named, as runs of the problem's (empty: its own); None for an open mesh. Where
            configured strategies separate what a named axis consists of, its parts are axes.
    """
    prime = finest(problem.mesh)
    if axes is None:
        meshes = [one for runs in factorisations(problem.mesh, cluster) if (one := coarsened(problem, runs))]
    else:
        named = tuple(run for run in axes if run) or prime
        one = coarsened(problem, named) or Coarsened(problem, prime)
        meshes = [one] if len(one.runs) <= MOST_AXES else []
    return DynamicProgramming(problem, cluster, meshes) if meshes else None
