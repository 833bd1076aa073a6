"""Classes of equivalent operators: searches that decide once per class use them.

Operators are equivalent if their rules, shapes and configured strategies are equal and so are those of everything up to
`DEPTH` operators away. Source: colour refinement (Weisfeiler and Leman, 1968), stopped early. Invariant: a strategy
that is legal for one member is legal for all, and the edges between classes are exactly the edges between their
members, counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from strategies.core.graph import Operator, Ref, Source
from strategies.cost.problem import Problem
from strategies.rules.sharding import Assignment

DEPTH = 2


@dataclass(frozen=True)
class Edge:
    """Values that members of one class hand to members of another: result `index` to operand `position`. `after` is
    the use before this one of the same value (class and position), None for the first."""

    producer: int
    index: int
    user: int
    position: int
    after: tuple[int, int] | None


@dataclass(frozen=True)
class Classes:
    """`members[c]` are the operators of class c, `edges` count each kind of edge, `of` has the class of an operator."""

    members: tuple[tuple[Operator, ...], ...]
    edges: dict[Edge, int]
    of: dict[str, int]

    @cached_property
    def representatives(self) -> tuple[Operator, ...]:
        """One member of each class."""
        return tuple(members[0] for members in self.members)


def equivalence_classes(
    problem: Problem, chosen: Mapping[str, Assignment] | None = None, *, single: bool = False
) -> Classes:
    """The classes of a problem's operators, in the order of their first members.

    Args:
        problem: the problem.
        chosen: assignments by id that equivalent operators must share, if any.
        single: put every operator into a separate class.
    """
    key = None if chosen is None else tuple([tuple(one.items()) for one in chosen.values()])
    return problem.once(("classes", key, single), lambda: _classes(problem, chosen, single))


def _classes(problem: Problem, chosen: Mapping[str, Assignment] | None, single: bool) -> Classes:
    graph = problem.graph
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    leaving: dict[str, list[Hashable]] = {}
    for ref, why in (*((ref, "output") for ref in graph.outputs), *((ref, "update") for _, ref in graph.updates)):
        leaving.setdefault(ref.id, []).append((ref.index, why))
    colour = {
        id: number((kind, tuple(leaving.get(id, ())), chosen and tuple(chosen[id].items())))
        for id, kind in problem.kinds.items()
    }
    sources = {source.id: number(_source(problem, source)) for source in graph.sources}
    uses = {
        operator.id: [
            (user.id, index, position)
            for index in range(len(operator.results))
            for user, position in graph.users[Ref(operator.id, index)]
        ]
        for operator in graph.operators
    }
    for _ in range(DEPTH):
        seen = sources | colour
        for operator in graph.operators:
            key: list[Hashable] = [seen[operator.id], *[(seen[ref.id], ref.index) for ref in operator.operands], None]
            key += sorted([(seen[id], index, position) for id, index, position in uses[operator.id]])
            colour[operator.id] = number(tuple(key))
    if single:
        colour = {operator.id: place for place, operator in enumerate(graph.operators)}
    members: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        members.setdefault(colour[operator.id], []).append(operator)
    of = {operator.id: place for place, group in enumerate(members.values()) for operator in group}
    edges: Counter[Edge] = Counter()
    for operator in graph.operators:
        for index in range(len(operator.results)):
            last = None
            for user, position in graph.users[Ref(operator.id, index)]:
                use = of[user.id], position
                edges[Edge(of[operator.id], index, *use, last)] += 1
                last = use
    return Classes(tuple(map(tuple, members.values())), dict(edges), of)


def repeats(problem: Problem) -> bool:
    """Whether the model has repeated layers: some product of tensors has an equivalent one."""
    members = equivalence_classes(problem).members
    return any(len(group) > 1 and problem.shardings[group[0].id].sums for group in members)


def _source(problem: Problem, source: Source) -> Hashable:
    """The key by which uses of a source are equivalent; a parameter with several uses is equivalent to no other."""
    users = len(problem.graph.users[Ref(source.id)])
    single = source.id if source.kind == "parameter" and users > 1 else None
    layout = problem.inputs[source.name] if source.kind == "input" else None
    return source.kind, source.spec, source.trainable, layout, single
