"""What modules receive and return: where a trainer that lays out modules can change a layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strategies.core.graph import Operator, OperatorGraph, Ref, modules_around
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.planner.declared_layouts import operand_layouts


@dataclass(frozen=True)
class Boundary:
    """One value at the border of a module.

    Attributes:
        ref: the value.
        layout: in which its users take it.
        shape: the global one.
    """

    ref: Ref
    layout: Layout
    shape: tuple[int, ...]


def boundaries(graph: OperatorGraph, plan: Plan) -> tuple[dict[str, Boundary], dict[str, Boundary]]:
    """What modules receive and return, by path: those with one value each way that all users take in one layout. So a
    value that several modules take is laid out once, where the module around them receives it. Modules with parameters
    of their own have an entry also where users differ, for the first of them."""
    owners = {source.name.rpartition(".")[0] for source in graph.sources if source.kind == "parameter"}
    owners |= {alias.rpartition(".")[0] for source in graph.sources for alias in source.aliases}
    tensors = {source.id for source in graph.sources if source.kind != "input"}
    received: dict[str, Boundary] = {}
    returned: dict[str, Boundary] = {}
    for path, operators in operators_inside(graph).items():
        made = {operator.id for operator in operators}
        taken = [
            (ref, layout)
            for operator in operators
            for ref, layout in zip(operator.operands, operand_layouts(operator, graph, plan), strict=True)
            if ref.id not in made and ref.id not in tensors
        ]
        for table, uses in ((received, taken), (returned, list(_uses_outside(graph, plan, operators, made)))):
            if len({ref for ref, _ in uses}) == 1 and (path in owners or len({*uses}) == 1):
                ref, layout = uses[0]
                table[path] = Boundary(ref, layout, graph.specs[ref].shape)
    return received, returned


def borders(graph: OperatorGraph) -> frozenset[tuple[Ref, str]]:
    """The values and their users, by id, that have the border of a module between them which has one value each way."""
    tensors = {source.id for source in graph.sources if source.kind != "input"}
    found: set[tuple[Ref, str]] = set()
    for operators in operators_inside(graph).values():
        made = {operator.id for operator in operators}
        taken = {(ref, one.id) for one in operators for ref in one.operands if ref.id not in made | tensors}
        refs = (Ref(one.id, index) for one in operators for index in range(len(one.results)))
        handed = {(ref, user.id) for ref in refs for user, _ in graph.users[ref] if user.id not in made}
        for uses in (taken, handed):
            if len({ref for ref, _ in uses}) == 1:
                found |= uses
    return frozenset(found)


def operators_inside(graph: OperatorGraph) -> dict[str, list[Operator]]:
    """The operators of every module, those of the modules in it included, by path; the model itself is left out, and so
    are lists of modules, which nobody calls, and sequences, whose first and last module receive and return the same."""
    inside: dict[str, list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        for path in modules_around(tuple(operator.module.split("."))) if operator.module else ():
            inside[path].append(operator)
    return {path: operators for path, operators in inside.items() if not _is_list(path, operators)}


def _is_list(path: str, operators: Sequence[Operator]) -> bool:
    """Whether all operators of a module are those of numbered modules in it."""
    return all(one.module[len(path) + 1 :].partition(".")[0].isdigit() for one in operators)


def _uses_outside(
    graph: OperatorGraph, plan: Plan, operators: Sequence[Operator], made: set[str]
) -> Iterator[tuple[Ref, Layout]]:
    """Every use of what the operators of a module, `made`, return by others, with the layout in which it is used."""
    for operator in operators:
        for index in range(len(operator.results)):
            for user, position in graph.users[Ref(operator.id, index)]:
                if user.id not in made:
                    yield Ref(operator.id, index), operand_layouts(user, graph, plan)[position]
