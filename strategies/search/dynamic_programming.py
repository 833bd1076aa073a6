"""Dynamic programming over the operator graph: the plan that costs least, with a certificate, on at most three axes.

problem -> strategy space -> cost graph -> elimination -> assignments. Factors hold lower bounds first: entries that a
solution uses are evaluated exactly, and values for which it pays too little are shared, until the solution costs what
the graph says. Each solution is a plan, and each minimum of the graph a lower bound, so both are known at any time. A
graph that is too wide to be eliminated is bounded by message passing, and solved by reduced-cost fixing.

A memory limit enters as a Lagrange multiplier, seconds per byte. For any multiplier, the least cost minus the
multiplier times the limit bounds all plans within the limit from below (M. Held, R. Karp, 1970). The next multiplier is
that at which the best plans on both sides of the limit cost the same, until nothing is cheaper there: then the bound is
the best one (J. Kelley, "The cutting-plane method", 1960). What was found for one limit serves the next.

On an open mesh every factorisation of the ranks into at most three axes that respects the topology is searched. A mesh
of more axes has no exact search: recursive programming takes its place, without a certificate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from strategies.core.gc_paused import gc_paused
from strategies.core.graph import Ref
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.cost.plan_cost import MOST_AXES
from strategies.cost.problem import Problem
from strategies.cost.resharding_matrix import ReshardingCosts
from strategies.search.cost_graph import CostGraph
from strategies.search.dual_bound import ReducedCostFixing
from strategies.search.elimination import Elimination
from strategies.search.mesh_choice import (
    ENOUGH,
    Chosen,
    Coarsened,
    Factorisation,
    choose,
    coarsened,
    factorisations,
    finest,
    least_work,
    refines,
)
from strategies.search.solution import Solution, too_large
from strategies.search.strategy_space import StrategySpace

TOLERANCE = {1: 1e-12, 2: 1e-12, 3: 0.01}
"""Gap at which the search ends, by the axes of a mesh. With a memory limit the gap may stay larger."""
LITTLE = 0.003
"""Share of the cost of a plan: once two factorisations of a wide graph are known, others that cannot be cheaper by more
are not searched to their end."""
ATTEMPTS = 12
"""Solutions of a wide graph with one bound, and at one multiplier."""
SHARED_EARLY = 3
"""Axes from which on values are shared before all that a solution uses is exact."""

PRECISION = 1e-6
"""Relative difference below which two multipliers are equal."""
MULTIPLIERS, WIDE_MULTIPLIERS = 24, 8
"""Multipliers that are tried at most for one limit; the latter in a graph that is too wide to be eliminated."""
FIRST, HIGH, HIGHEST = 0.25, 4.0, 1e7
"""Multipliers that are tried until a plan keeps the limit, in units of the one at which the memory of the limit costs
as much as the step: the first, where doubling ends, and the last, at which only memory counts."""
SHARE = 0.5
"""Share of the tolerated gap that may be left to the bound; the rest is for the plan."""
LOOSE = 0.03
"""Gap at a multiplier that may not be the last one."""
Name = str | Ref
"""A variable that decides about a plan: an operator by its id, or a parameter with several uses."""


@dataclass(frozen=True)
class DualPoint:
    """The best plan at one multiplier, whose `lower_bound` includes the cost of its bytes; the index of the candidate
    of every variable; whether the search was `stopped` because nothing cheap enough was left."""

    solution: Solution
    indices: Mapping[Name, int]
    stopped: bool = False


class PlanSearch:
    """The best plan of one problem at one multiplier after another: what was evaluated for one serves the next.

    Args:
        problem: on at most three axes.
        cluster: whose seconds are minimised.
        tolerance: gap at which the search ends; None for that of `TOLERANCE`.
        wide: whether the cost graph is too wide to be eliminated; else that is found out.
        like: the search of another mesh with as many axes, whose evaluations show where bounds are too low, and which
            values a wide graph has to share: a proof without them takes as long as one with them.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        tolerance: float | None = None,
        *,
        wide: bool = False,
        like: PlanSearch | None = None,
    ) -> None:
        self.problem, self.wide = problem, wide
        self.shared: frozenset[Ref] = frozenset() if like is None else like.shared | like.graph.shared
        self.space = StrategySpace(problem, ReshardingCosts(problem.mesh, cluster))
        self.axes = len(self.space.axes)
        self.tolerance = TOLERANCE[max(self.axes, 1)] if tolerance is None else tolerance
        self.graph: CostGraph = self._build()
        if like is not None and like.wide:  # solutions of others are cheap, and show the same
            self.space.resharding.learn(like.space.resharding)
            self.graph.refresh()

    def _build(self, shared: frozenset[Ref] = frozenset(), like: CostGraph | None = None) -> CostGraph:
        graph = CostGraph(self.problem, self.space, shared, wide=self.wide, like=like)
        self.solver: Elimination | ReducedCostFixing = (
            ReducedCostFixing(graph.factors, self.tolerance)
            if self.wide
            else Elimination(dict(enumerate(graph.factors.sizes)), graph.factors.factors)
        )
        return graph

    def solve(self, prove: bool = True, enough: float = math.inf) -> tuple[list[int], float]:
        """The candidates of a solution, and seconds that every one costs at least. A wide graph takes long to `prove`
        anything beyond `enough` seconds: else its best candidates are compared again, and the bound is the last one."""
        if isinstance(self.solver, Elimination) and self.solver.kept:
            self.wide = prove = True
            self.graph = self._build(self.shared, self.graph)
        if isinstance(self.solver, ReducedCostFixing):
            return self.solver.solve(enough) if prove else self.solver.again()
        indices, seconds = self.solver.solve(self.graph.factors.memo)
        return [indices[v] for v in range(len(indices))], seconds

    def cheapest(self, multiplier: float, tolerance: float, enough: float = math.inf) -> DualPoint:
        """The plan that costs least where a byte costs `multiplier` seconds; its `lower_bound` includes that of its
        bytes. The search stops once no plan costs less than `enough`."""
        most = ATTEMPTS if self.wide and multiplier else math.inf
        self.graph.set_multiplier(multiplier)
        best: Solution | None = None
        named: Mapping[Name, int] = {}
        lower = least = 0.0
        solutions, proven = 0, 1  # the latter: how many there were when the bound was found
        while True:
            indices, bound = self.solve(proven > solutions, enough)
            lower = max(lower, bound)
            if best is not None and lower >= enough:
                break
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
        return DualPoint(replace(best, lower_bound=min(lower, least)), named, lower >= enough)

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


@dataclass(frozen=True)
class MemoryBudget:
    """The plans that one `solver` found. By multiplier: `bounds`, the least cost of any plan with that of its bytes,
    and the relative `gaps` of the plans."""

    solver: PlanSearch
    points: list[DualPoint] = field(default_factory=list)
    bounds: dict[float, float] = field(default_factory=dict)
    gaps: dict[float, float] = field(default_factory=dict)
    smallest: list[Solution] = field(default_factory=list)
    """The smallest plan, once it was needed."""

    def within(self, limit: float | None, enough: float = math.inf) -> Solution | None:
        """The cheapest plan that keeps the limit in bytes per rank; None where none takes less than `enough` seconds.

        Raises:
            TooLarge: no plan within the limit was found.
        """
        self._try(0.0, self.solver.tolerance, enough)
        if self.bounds[0.0] >= enough:
            return None
        free = self._best(math.inf)
        assert free is not None
        if limit is None or free.bytes <= limit:
            return replace(free, lower_bound=min(self.bounds[0.0], free.cost))
        for _ in range(WIDE_MULTIPLIERS if self.solver.wide else MULTIPLIERS):
            multiplier = self._next(limit)
            if multiplier is None:
                break
            tolerance = self.solver.tolerance
            self._try(multiplier, tolerance if multiplier in self.bounds else max(LOOSE, tolerance))
            if self.lower_bound(limit) >= enough:
                return None
        best = self._best(limit)
        if best is None:
            raise too_large(limit, min(one.bytes for one in [*(x.solution for x in self.points), *self.smallest]))
        styled = self.solver.problem.styled
        if not self._near(best.cost, limit) and (styled is None or styled.layers_differ):
            best = min([best, *self._mixed(limit)], key=lambda one: one.cost)
        return replace(best, lower_bound=min(self.lower_bound(limit), best.cost))

    def lower_bound(self, limit: float | None) -> float:
        """Seconds below those of any plan within the limit."""
        if limit is None:
            return self.bounds[0.0]
        return max(bound - multiplier * limit for multiplier, bound in self.bounds.items())

    def _try(self, multiplier: float, tolerance: float, enough: float = math.inf) -> None:
        if self.gaps.get(multiplier, math.inf) <= tolerance or self.bounds.get(multiplier, -math.inf) >= enough:
            return
        point = self.solver.cheapest(multiplier, tolerance, enough)
        found = point.solution
        bound = max(found.lower_bound, self.bounds.get(multiplier, 0.0))
        gap = (found.cost + multiplier * found.bytes) / bound - 1 if bound else 0.0
        self.bounds[multiplier], self.gaps[multiplier] = bound, gap if point.stopped else min(gap, tolerance)
        self.points.append(point)

    def _best(self, limit: float) -> Solution | None:
        fitting = [one.solution for one in self.points if one.solution.bytes <= limit]
        return min(fitting, key=lambda one: one.cost, default=None)

    def _next(self, limit: float) -> float | None:
        """The multiplier to try next; None where none is promising."""
        best = self._best(limit)
        if best is None:
            unit, tried = self.points[0].solution.cost / limit, max(self.bounds)
            multiplier = max(FIRST * unit, 2 * tried)
            if tried and not self.solver.wide and self._smallest_bytes() > limit:
                return None
            return multiplier if multiplier <= HIGH * unit else HIGHEST * unit if tried < HIGHEST * unit else None
        large, small = (one.solution for one in self._around(limit))
        multiplier = (small.cost - large.cost) / (large.bytes - small.bytes)
        if multiplier <= 0 or self._near(small.cost - multiplier * (limit - small.bytes), limit, SHARE):
            return None
        tried = min(self.bounds, key=lambda other: abs(multiplier - other))
        if abs(multiplier - tried) > PRECISION * multiplier:
            return multiplier
        return tried if self.gaps[tried] > self.solver.tolerance else None

    def _smallest_bytes(self) -> float:
        """Bytes of the plan that needs least: where that is too large, no multiplier finds one."""
        if not self.smallest:
            free = self.points[0].solution
            multiplier = HIGHEST * free.cost / free.bytes
            self.smallest.append(self.solver.cheapest(multiplier, self.solver.tolerance).solution)
        return self.smallest[0].bytes

    def _near(self, seconds: float, limit: float, share: float = 1.0) -> bool:
        """Whether a gap in seconds is within a share of the tolerance."""
        bound = self.lower_bound(limit)
        return seconds - bound <= share * self.solver.tolerance * bound

    def _around(self, limit: float) -> tuple[DualPoint, DualPoint]:
        """The plans on both sides of the limit between which it costs least to keep it: no bound is higher than the
        line between them at the limit."""
        large = [one for one in self.points if one.solution.bytes > limit]
        small = [one for one in self.points if one.solution.bytes <= limit]

        def between(pair: tuple[DualPoint, DualPoint]) -> float:
            a, b = (one.solution for one in pair)
            return b.cost + (a.cost - b.cost) * (limit - b.bytes) / (a.bytes - b.bytes)

        return min(product(large, small), key=between)

    def _mixed(self, limit: float) -> list[Solution]:
        """Plans that take the first part of the program from one plan and the rest from another, and keep the limit:
        repeated layers all change at one multiplier, so the limit may fall between two plans."""
        large, small = (one.indices for one in self._around(limit))
        found = []
        for first, last in ((large, small), (small, large)):
            low, high = 0, len(first)
            while high - low > 1:
                middle = (low + high) // 2
                one = self.solver.evaluated(first, last, middle)
                if one.bytes <= limit:
                    found.append(one)
                if (one.bytes <= limit) == (first is large):
                    low = middle
                else:
                    high = middle
        return found


@gc_paused()
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
        self.budgets: dict[Factorisation, MemoryBudget] = {}
        self.bounds = dict.fromkeys(self.meshes, 0.0)
        if len(meshes) > 1:
            prime = finest(problem.mesh)
            self.bounds |= {runs: least_work(problem, cluster, runs) for runs in self.meshes if runs != prime}

    @gc_paused()
    def within(self, memory: float | None) -> Chosen:
        """The best plan over all meshes within a memory limit in bytes per rank.

        Raises:
            StrategyError: no plan within the limit was found on any mesh.
        """

        costs: list[float] = []

        def on_mesh(runs: Factorisation, enough: float) -> Solution | float:
            mesh, solvers = self.meshes[runs], [one.solver for one in self.budgets.values()]
            if len(costs) >= ENOUGH and any(one.wide for one in solvers):
                enough = min(enough, (1 - LITTLE) * min(costs))
                finer = [one.lower_bound(memory) for other, one in self.budgets.items() if refines(other, runs)]
                if max(finer, default=0.0) >= enough:
                    return max(finer)
            if runs not in self.budgets:
                like = next((one for one in reversed(solvers) if one.axes == len(runs)), None)
                self.budgets[runs] = MemoryBudget(PlanSearch(mesh.problem, self.cluster, like=like))
            budget = self.budgets[runs]
            found = budget.within(memory, enough)
            if found is None:
                return budget.lower_bound(memory)
            costs.append(found.cost)
            return mesh.refined(found)

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
