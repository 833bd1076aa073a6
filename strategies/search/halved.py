"""The plan of recursive programming as the exact search tells its plans: where that has no better one, or no time."""

from __future__ import annotations

from strategies.cost.cluster import Cluster
from strategies.search import recursive
from strategies.search.classes import classes
from strategies.search.finding import Found
from strategies.search.kept import plan_bytes
from strategies.search.prices import Pricing
from strategies.search.problem import Problem


def halved(problem: Problem, cluster: Cluster) -> Found:
    """On all axes; priced with the engine's chains, as rounds price many axes in closed form. It bounds nothing."""
    found = recursive.in_rounds(recursive.prices(problem, cluster), classes(problem))
    seconds = Pricing(problem, cluster).total(found.assignments)
    return Found(found.assignments, {}, seconds, 0.0, plan_bytes(problem, found.assignments))
