"""The searches that price whole plans, by the name that a request gives them: on the mesh that somebody named, or over
all that respect the cluster.

Invariant: both give a plan of the problem's own prime axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strategies.cost.cluster import Cluster
from strategies.graph import Ref
from strategies.layout import Layout
from strategies.meshing import Axes
from strategies.rules.sharding import Assignment
from strategies.search.choosing import Exactly, Halving, choose, search_on, searchable
from strategies.search.exact import search
from strategies.search.finding import Found, uncollected
from strategies.search.kept import plan_bytes
from strategies.search.problem import Problem
from strategies.search.recursive import bisect


@dataclass(frozen=True)
class Solved:
    """Assignments by operator id, layouts of parameters with several uses (others lie as their first use wants them),
    and what a plan's `search` tells."""

    assignments: Mapping[str, Assignment]
    tensors: Mapping[Ref, Layout] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)


Solver = Callable[[Problem, Cluster, tuple[Axes, ...] | None], Solved]
"""Problem, cluster, the axes that a user named (as runs of the problem's; empty: its own) or None where the mesh is to
be chosen. Raises StrategyError where no plan within the problem's memory is found."""


def exact(problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None) -> Solved:
    """The cheapest plan with its certificate, and with an open mesh the best plan on another one. Where configured
    strategies tell apart what a named axis consists of, its parts are axes."""
    named = tuple(run for run in axes or () if run)
    if named and (found := search_on(problem, cluster, named)) is not None:
        return _certified(found, {})
    if axes is not None and searchable(problem):
        return _certified(search(problem, cluster), {})
    chosen = choose(problem, cluster, Exactly(problem, cluster))
    one = chosen.answer
    found = Found(one.assignments, one.tensors, one.seconds, chosen.bound, one.bytes)
    return _certified(found, chosen.to_json())


def _certified(found: Found, meshes: Mapping[str, Any]) -> Solved:
    told = {"cost": found.cost, "lower_bound": found.lower_bound, "gap": found.gap, "bytes": found.bytes}
    return Solved(found.assignments, found.tensors, told | dict(meshes))


def halved(problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None) -> Solved:
    """A cheap plan, with an open mesh the best of those on all meshes."""
    told: dict[str, Any] = {}
    if axes is not None:
        found: Mapping[str, Assignment] = bisect(problem, cluster, axes)
    else:
        with uncollected():
            chosen = choose(problem, cluster, Halving(problem, cluster))
        found, told = chosen.answer.assignments, chosen.to_json()
    return Solved(found, told=told | {"bytes": plan_bytes(problem, found)})


SOLVERS: Mapping[str, Solver] = {"dynamic_programming": exact, "recursive_programming": halved}
