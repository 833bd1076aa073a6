"""Operators that are alike, so that a search decides once for all of them: the repeated layers of a model.

Two operators are of one class if their rules, shapes and configured strategies are equal and so are those of everything
up to `DEPTH` operators away. Source: colour refinement (Weisfeiler and Leman, 1968), stopped early. Invariant: what is
legal for one member is legal for all, and the edges between classes are exactly the edges between their members,
counted. Cost: linear in the operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from strategies.core.graph import Operator, Ref, Source
from strategies.rules.sharding import Assignment
from strategies.search.problem import Problem

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
    """`members[c]` are the operators of class c, `edges` say how often each kind of edge occurs."""

    members: tuple[tuple[Operator, ...], ...]
    edges: dict[Edge, int]
    of: dict[str, int]

    @cached_property
    def heads(self) -> tuple[Operator, ...]:
        """One member of each class."""
        return tuple(members[0] for members in self.members)


def classes(problem: Problem, chosen: Mapping[str, Assignment] | None = None, *, apart: bool = False) -> Classes:
    """The classes of a problem's operators, in the order of their first members. With assignments `chosen` by id,
    operators are alike only if these are equal too; `apart`, every operator is alike only to itself."""
    name = None if chosen is None else tuple([tuple(one.items()) for one in chosen.values()])
    return problem.once(("classes", name, apart), lambda: _classes(problem, chosen, apart))


def _classes(problem: Problem, chosen: Mapping[str, Assignment] | None, apart: bool) -> Classes:
    graph = problem.graph
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    leaving: dict[str, list[Hashable]] = {}
    for ref, why in (*((ref, "output") for ref in graph.outputs), *((ref, "update") for _, ref in graph.updates)):
        leaving.setdefault(ref.id, []).append((ref.index, why))
    colour = {
        operator.id: number((_said(problem, operator, leaving), _slices(chosen, operator)))
        for operator in graph.operators
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
    if apart:
        colour = {operator.id: place for place, operator in enumerate(graph.operators)}
    order: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        order.setdefault(colour[operator.id], []).append(operator)
    of = {operator.id: place for place, members in enumerate(order.values()) for operator in members}
    edges: Counter[Edge] = Counter()
    for operator in graph.operators:
        for index in range(len(operator.results)):
            last = None
            for user, position in graph.users[Ref(operator.id, index)]:
                use = of[user.id], position
                edges[Edge(of[operator.id], index, *use, last)] += 1
                last = use
    return Classes(tuple(map(tuple, order.values())), dict(edges), of)


def repeats(problem: Problem) -> bool:
    """Whether the model has repeated layers: some product of tensors has a twin."""
    return any(len(members) > 1 and problem.shardings[members[0].id].sums for members in classes(problem).members)


def _said(problem: Problem, operator: Operator, leaving: Mapping[str, Sequence[Hashable]]) -> Hashable:
    """All that an operator's own price and choices depend on; `leaving` says which results leave the graph, and why."""
    sharding = problem.shardings[operator.id]
    fixed = problem.fixed.get(operator.id)
    return (
        operator.op,
        operator.id in problem.graph.returning,
        tuple(Ref(operator.id, index) in problem.stored for index in range(len(operator.results))),
        sharding.operands,
        sharding.results,
        tuple(sharding.sizes.items()),
        sharding.sums,
        sharding.uneven,
        sharding.flops,
        operator.results,
        tuple(map(problem.graph.specs.__getitem__, operator.operands)),
        None if fixed is None else tuple(fixed.items()),
        problem.outputs.get(operator.id),
        tuple(leaving.get(operator.id, ())),
    )


def _slices(chosen: Mapping[str, Assignment] | None, operator: Operator) -> Hashable:
    return None if chosen is None else tuple(chosen[operator.id].items())


def _source(problem: Problem, source: Source) -> Hashable:
    """What the uses of a source depend on; a parameter with several uses is like no other."""
    users = len(problem.graph.users[Ref(source.id)])
    alone = source.id if source.kind == "parameter" and users > 1 else None
    layout = problem.inputs[source.name] if source.kind == "input" else None
    return source.kind, source.spec, source.trainable, layout, alone
