"""The mesh, where nobody named one: every factorisation of the ranks is bounded below, what could be among the best two
is searched, and the best is told beside its runner-up.

The searcher is a parameter. One that knows bounds of its own (the exact one) says more: what bounds the plans of a
factorisation bounds those of all that it refines, and a factorisation that contains the best mesh has nothing better
where that is the best there is. Only another mesh is a runner-up, after axes that no operator tells apart are one.
Invariant: what is left out could not have been among the best two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from strategies.core.errors import StrategyError
from strategies.core.graph import Ref
from strategies.core.layout import Layout
from strategies.cost.cluster import Cluster
from strategies.rules.sharding import Assignment
from strategies.search import recursive
from strategies.search.classes import classes
from strategies.search.coarse import shared
from strategies.search.exact import CERTAIN, MOST_PRIMES, on_mesh
from strategies.search.finding import Found
from strategies.search.halved import halved
from strategies.search.joining import least as least_of_all
from strategies.search.joining import on_runs
from strategies.search.kept import too_large
from strategies.search.meshes import Factors, factorisations, finest, joined, least, refines, told_apart
from strategies.search.problem import Problem

MOST_SHARED = 7
"""Prime axes up to which the finest factorisation is searched exactly, where a parameter has several uses; without such
parameters it is as many as classes are compared on."""


@dataclass(frozen=True)
class Answer:
    """The best plan that was found on a factorisation: assignments by operator id, layouts of parameters with several
    uses, seconds, bytes that a rank keeps, and the least that any plan there takes (0: not known)."""

    assignments: Mapping[str, Assignment]
    seconds: float
    bytes: float
    bound: float = 0.0
    tensors: Mapping[Ref, Layout] = field(default_factory=dict)


class Searcher(Protocol):
    """A search of single factorisations."""

    def factorisations(self) -> list[Factors]:
        """The finest, and coarser ones that may be searched."""

    def on(self, factors: Factors) -> Answer:
        """What it finds. Raises StrategyError where no plan keeps the limit of memory."""

    def finished(self, factors: Factors) -> Answer:
        """What it found there, with what is only done to the plan that is taken."""

    def least(self) -> float:
        """Seconds below those of any plan, where it knows them without a search; else 0."""


@dataclass(frozen=True)
class Tried:
    """A mesh by the sizes of its axes, and the seconds of the best plan on it."""

    mesh: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Chosen:
    """The best plan over all meshes, with the least that any takes (0: not known); the best on another mesh, with its
    plan; of how many factorisations the best plan is known, and how many were left out."""

    answer: Answer
    bound: float
    best: Tried
    runner_up: Tried | None
    second: Answer | None
    known: int
    left_out: int

    def to_json(self) -> dict[str, Any]:
        """What a plan's `search` tells of it."""
        runner_up = None if self.runner_up is None else asdict(self.runner_up)
        return {"mesh": asdict(self.best), "runner_up": runner_up, "meshes": self.known, "left_out": self.left_out}


class Halving:
    """Recursive programming, with prices that all factorisations share."""

    def __init__(self, problem: Problem, cluster: Cluster) -> None:
        self.problem, self.cluster = problem, cluster
        self.pricing, self.alike = recursive.prices(problem, cluster), classes(problem)
        self.found: dict[Factors, recursive.Found] = {}

    def factorisations(self) -> list[Factors]:
        return list(factorisations(self.problem.mesh, self.cluster))

    def on(self, factors: Factors) -> Answer:
        found = self.found[factors] = recursive.in_rounds(self.pricing, self.alike, factors)
        return Answer(found.assignments, found.seconds, found.bytes)

    def finished(self, factors: Factors) -> Answer:
        found = recursive.apart(self.pricing, self.found[factors])
        return Answer(found.assignments, found.seconds, found.bytes)

    def least(self) -> float:
        return 0.0


class Exactly:
    """Dynamic programming: the finest factorisation is its own mesh, coarser ones join its axes. Of more axes
    than `searchable` says recursive programming answers for the finest, and its bound is work alone."""

    def __init__(self, problem: Problem, cluster: Cluster) -> None:
        self.problem, self.cluster = problem, cluster
        self.found: dict[Factors, Answer] = {}

    def factorisations(self) -> list[Factors]:
        mesh, every = self.problem.mesh, len(self.problem.mesh.names)
        coarser = [runs for runs in joined(mesh, self.cluster, every) if on_runs(self.problem, runs) is not None]
        return [finest(mesh), *coarser]

    def on(self, factors: Factors) -> Answer:
        fine = factors == finest(self.problem.mesh) and not searchable(self.problem)
        if fine:
            rounds = halved(self.problem, self.cluster)
            found: Found | None = replace(rounds, lower_bound=min(self.least(), rounds.cost))
        else:
            found = search_on(self.problem, self.cluster, factors)
        assert found is not None  # else it is none of the factorisations
        self.found[factors] = Answer(found.assignments, found.cost, found.bytes, found.lower_bound, found.tensors)
        return self.found[factors]

    def finished(self, factors: Factors) -> Answer:
        return self.found[factors]

    def least(self) -> float:
        return least_of_all(self.problem, self.cluster)


def searchable(problem: Problem) -> bool:
    """Whether the exact search takes seconds on all prime axes of a problem's mesh."""
    return len(finest(problem.mesh)) <= (MOST_SHARED if shared(problem) else MOST_PRIMES)


def search_on(problem: Problem, cluster: Cluster, factors: Factors) -> Found | None:
    """The exact search on the mesh of these axes, see `on_mesh`. Raises StrategyError."""
    within = on_mesh(problem, cluster, factors)
    return None if within is None else within(problem.memory)


def choose(problem: Problem, cluster: Cluster, searcher: Searcher) -> Chosen:
    """The cheapest plan on any factorisation of the problem's mesh of prime axes. Raises StrategyError where none keeps
    the problem's memory."""
    pricing, alike = recursive.prices(problem, cluster), classes(problem)
    whole = finest(problem.mesh)
    bounds = {
        factors: 0.0 if factors == whole else least(pricing, alike, factors) for factors in searcher.factorisations()
    }
    best: dict[Factors, tuple[Factors, Answer]] = {}
    """By mesh: where the best plan on it was found."""
    smallest: float | None = None
    refused: StrategyError | None = None
    known = left_out = 0
    for factors in sorted(bounds, key=bounds.__getitem__):
        ranked = sorted(best, key=lambda mesh: best[mesh][1].seconds)
        if len(ranked) > 1 and bounds[factors] >= best[ranked[1]][1].seconds:
            left_out += 1
            continue
        if ranked and refines(factors, ranked[0]) and _certain(best[ranked[0]][1].seconds, bounds[factors]):
            known += 1
            continue
        try:
            answer = searcher.on(factors)
        except StrategyError as error:
            refused = refused or error
            continue
        known += 1
        for other in bounds:
            if refines(factors, other):
                bounds[other] = max(bounds[other], answer.bound)
        if problem.memory is not None and answer.bytes > problem.memory:
            smallest = min(smallest or answer.bytes, answer.bytes)
            continue
        mesh = told_apart(problem.mesh, answer.assignments)
        if mesh not in best or answer.seconds < best[mesh][1].seconds:
            best[mesh] = factors, answer
    if not best:
        if problem.memory is not None and smallest is not None:
            raise too_large(problem.memory, smallest)
        assert refused is not None
        raise refused
    first, *others = sorted(best, key=lambda mesh: best[mesh][1].seconds)
    answer = searcher.finished(best[first][0])
    tried = [
        Tried(tuple(problem.mesh.product(run) for run in mesh), best[mesh][1].seconds) for mesh in (first, *others[:1])
    ]
    bound = min(bounds.get(whole) or searcher.least(), answer.seconds)
    second = best[others[0]][1] if others else None
    return Chosen(answer, bound, tried[0], tried[1] if others else None, second, known, left_out)


def _certain(seconds: float, bound: float) -> bool:
    return seconds - bound <= CERTAIN * bound
