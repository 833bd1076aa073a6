"""The searches that price whole plans, by the name that a request gives them: on the mesh that somebody named, or over
all that respect the cluster.

Invariant: both give a plan of the problem's own prime axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strategies.core.gc_paused import gc_paused
from strategies.core.graph import Ref
from strategies.core.layout import Layout
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.rules.sharding import Assignment
from strategies.search.choosing import Answer, Exactly, Halving, choose, searchable
from strategies.search.exact import Exact, on_mesh, proven
from strategies.search.finding import Found
from strategies.search.kept import plan_bytes
from strategies.search.problem import Problem
from strategies.search.recursive import bisect


@dataclass(frozen=True)
class Solved:
    """Assignments by operator id, layouts of parameters with several uses (others lie as their first use wants them),
    and what a plan's `search` tells; `proven` is the same with a bound that takes longer to find. `second` is the best
    plan on another mesh, where the mesh was chosen."""

    assignments: Mapping[str, Assignment]
    tensors: Mapping[Ref, Layout] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    proven: Callable[[], Mapping[str, Any]] | None = None
    second: Solved | None = None


Within = Callable[[float | None], Found]
Solving = Callable[[float | None], Solved]
"""What finds plans of one problem for so many bytes of a rank; what it prices for one limit is known for the next.
Raises StrategyError where no plan within them is found."""
Solver = Callable[[Problem, Cluster, tuple[Axes, ...] | None], Solving]
"""Problem, cluster, the axes that a user named (as runs of the problem's; empty: its own) or None where the mesh is to
be chosen."""


def exact(problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None) -> Solving:
    """The cheapest plan with its certificate, and with an open mesh the best plan on another one."""
    within = None if axes is None else exact_within(problem, cluster, axes)
    if within is not None:
        return lambda memory: _certified(problem, cluster, within(memory), {})

    def chosen(memory: float | None) -> Solved:
        asked = problem.within(memory)
        best = choose(asked, cluster, Exactly(asked, cluster))
        one = best.answer
        found = Found(one.assignments, one.tensors, one.seconds, best.bound, one.bytes)
        return replace(_certified(problem, cluster, found, best.to_json()), second=_second(best.second))

    return chosen


def exact_within(problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None) -> Within | None:
    """The exact search of all plans along these axes; None where it takes too long. Where configured strategies tell
    apart what a named axis consists of, its parts are axes."""
    named = tuple(run for run in axes or () if run)
    within = on_mesh(problem, cluster, named) if named else None
    return Exact(problem, cluster).within if within is None and searchable(problem) else within


def _certified(problem: Problem, cluster: Cluster, found: Found, meshes: Mapping[str, Any]) -> Solved:
    def told(one: Found) -> dict[str, Any]:
        certificate = {"cost": one.cost, "lower_bound": one.lower_bound, "gap": one.gap, "bytes": one.bytes}
        return certificate | dict(meshes)

    return Solved(found.assignments, found.tensors, told(found), lambda: told(proven(problem, cluster, found)))


def _second(answer: Answer | None) -> Solved | None:
    return None if answer is None else Solved(answer.assignments, answer.tensors)


def halving(problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None) -> Solving:
    """A cheap plan, with an open mesh the best of those on all meshes."""

    def solve(memory: float | None) -> Solved:
        asked = problem.within(memory)
        if axes is not None:
            found = bisect(asked, cluster, axes)
            return Solved(found, told={"bytes": plan_bytes(asked, found)})
        with gc_paused():
            chosen = choose(asked, cluster, Halving(asked, cluster))
        assignments = chosen.answer.assignments
        told = chosen.to_json() | {"bytes": plan_bytes(asked, assignments)}
        return Solved(assignments, told=told, second=_second(chosen.second))

    return solve


SOLVERS: Mapping[str, Solver] = {"dynamic_programming": exact, "recursive_programming": halving}
