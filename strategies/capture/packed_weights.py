"""Fused weights: parameters that hold several sections, as the queries, keys and values of one projection.

Where a dim comes from parameters and is taken apart into sections, by a chunk, a split, slices or a reshape, it is
marked as packed in every tensor on the way. A slice of it is then a stripe of every section (Megatron's layout of fused
weights), so that taking it apart needs no collective. Invariant: what the graph computes, its shapes and its names stay
as they are; a dim is packed in all tensors that share it, or in none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from strategies.core.graph import FusedSections, Operator, OperatorGraph, Ref, Source, TensorSpec
from strategies.rules import rule_of
from strategies.rules.packed import RESHAPES, orderless, sections_taken, taken_apart

MOVES = RESHAPES | frozenset("contiguous clone movedim moveaxis permute swapaxes swapdims transpose".split())
"""Operators that a fused projection may pass until its sections are taken one by one."""
MOST_SECTIONS = 16


def packed(graph: OperatorGraph, given: Mapping[str, FusedSections] | None = None) -> OperatorGraph:
    """The graph with its packed dims marked.

    Args:
        graph: without marks, or with other ones.
        given: which parameters are packed, by name: graphs of one model slice its parameters equally. None: all that
            can be.
    """
    graph = _marked(graph, {})
    marks: dict[Ref, FusedSections] = {}
    for ref, sections in _candidates(graph):
        if (
            ref not in marks
            and (found := _closure(graph, ref, sections)) is not None
            and marks.keys().isdisjoint(found)
        ):
            names = {node.name: mark for one, mark in found.items() if isinstance(node := graph.by_id[one.id], Source)}
            if names and (given is None or all(given.get(name) == mark for name, mark in names.items())):
                marks |= found
    if given is not None:
        for one in graph.of_kind("parameter"):
            mark = given.get(one.name)
            if mark is not None and one.spec.shape[mark.dim : mark.dim + 1] == (sum(mark.sizes),):
                marks[Ref(one.id)] = mark
    return _marked(graph, marks)


def sections_of(graph: OperatorGraph) -> dict[str, FusedSections]:
    """The parameters that are packed, by name."""
    return {one.name: one.spec.packed for one in graph.of_kind("parameter") if one.spec.packed is not None}


def _marked(graph: OperatorGraph, marks: Mapping[Ref, FusedSections]) -> OperatorGraph:
    """The graph with these marks alone."""

    def spec(ref: Ref, old: TensorSpec) -> TensorSpec:
        return old if old.packed == marks.get(ref) else replace(old, packed=marks.get(ref))

    sources = tuple(replace(one, spec=spec(Ref(one.id), one.spec)) for one in graph.sources)
    operators = []
    for operator in graph.operators:
        results = tuple(spec(Ref(operator.id, index), old) for index, old in enumerate(operator.results))
        operators.append(operator if results == operator.results else replace(operator, results=results))
    if sources == graph.sources and all(a is b for a, b in zip(operators, graph.operators, strict=True)):
        return graph
    return replace(graph, sources=sources, operators=tuple(operators))


def _candidates(graph: OperatorGraph) -> Iterator[tuple[Ref, FusedSections]]:
    """Values that operators take apart, and how."""
    sliced: dict[tuple[Ref, int], set[tuple[int, int]]] = {}
    for operator in graph.operators:
        if not operator.operands:
            continue
        ref = operator.operands[0]
        spec = graph.specs[ref]
        if (taken := sections_taken(operator, spec)) is not None:
            dim, parts = taken
            if len(parts) > 1:
                yield ref, FusedSections(dim, tuple(stop - start for start, stop in parts))
            else:
                sliced.setdefault((ref, dim), set()).update(parts)
                ends = sorted({end for part in sliced[ref, dim] for end in part})
                if sliced[ref, dim] == set(pairwise(ends)) and (ends[0], ends[-1]) == (0, spec.shape[dim]):
                    if len(ends) > 2:
                        yield ref, FusedSections(dim, tuple(stop - start for start, stop in pairwise(ends)))
        elif operator.op in RESHAPES and len(operator.operands) == 1:
            for dim, size in enumerate(spec.shape):
                for count in range(2, MOST_SECTIONS + 1):
                    sections = FusedSections(dim, (size // count,) * count)
                    if size % count == 0 and size > count and count in operator.results[0].shape:
                        if (place := _new_dim(operator, spec, sections)) is not None and _each(graph, operator, place):
                            yield ref, sections


def _new_dim(operator: Operator, spec: TensorSpec, sections: FusedSections) -> int | None:
    """The dim of a reshape's result that counts the sections; None if it does not give them one."""
    found = taken_apart(operator, [spec], sections)
    if found is None or (factor := found.operands[0][sections.dim]) is None:
        return None
    return found.results[0].index(factor) - 1


def _each(graph: OperatorGraph, operator: Operator, dim: int) -> bool:
    """Whether every user of a result takes the entries of `dim` one by one, perhaps after some moves."""
    open_, users = [(Ref(operator.id), dim)], 0
    while open_:
        ref, dim = open_.pop()
        if not graph.users[ref]:
            return False
        for user, position in graph.users[ref]:
            users += 1
            if position or users > 4 * MOST_SECTIONS:
                return False
            rank, size = len(graph.specs[ref].shape), graph.specs[ref].shape[dim]
            if user.op in ("select", "unbind"):
                named = dict(zip(("self", "dim"), user.args, strict=False)) | user.keywords
                if int(named.get("dim", 0)) % rank == dim:
                    continue
            elif (taken := sections_taken(user, graph.specs[ref])) is not None and taken[0] == dim:
                if all(stop - start == 1 for start, stop in taken[1]) and size > 1:
                    continue
            elif user.op in MOVES:
                found = rule_of(user, graph)
                factor = found.operands[0][dim]
                if factor is not None and found.sizes[factor] == size and factor in found.results[0]:
                    moved = found.results[0].index(factor)
                    if user.results[0].shape[moved] == size:
                        open_.append((Ref(user.id), moved))
                        continue
            return False
    return True


def _closure(graph: OperatorGraph, first: Ref, sections: FusedSections) -> dict[Ref, FusedSections] | None:
    """Every value that shares a packed dim with that of `first`; None where one of them cannot be packed."""
    total, marks, open_ = sum(sections.sizes), {first: sections}, [first]
    leaving = {*graph.outputs, *(ref for _, ref in graph.updates)}

    def shared(operator: Operator, factor: str | None) -> bool:
        """Mark the operands and results of an operator that have a factor."""
        found = rule_of(operator, graph)
        if factor is None or not orderless(operator, found) or found.sizes[factor] != total:
            return False
        refs = (*operator.operands, *(Ref(operator.id, index) for index in range(len(operator.results))))
        for ref, dims in zip(refs, (*found.operands, *found.results), strict=True):
            if factor not in dims:
                continue
            mark = FusedSections(dims.index(factor), sections.sizes)
            if graph.specs[ref].shape[mark.dim] != total or marks.get(ref, mark) != mark:
                return False
            if ref not in marks:
                marks[ref] = mark
                open_.append(ref)
        return True

    while open_:
        ref = open_.pop()
        node, mark = graph.by_id[ref.id], marks[ref]
        if ref in leaving or (isinstance(node, Source) and node.kind != "parameter"):
            return None
        if isinstance(node, Operator) and not shared(node, rule_of(node, graph).results[ref.index][mark.dim]):
            return None
        for user, position in graph.users[ref]:
            apart = taken_apart(user, graph.operand_specs(user), mark) if position == 0 else None
            if apart is None and not shared(user, rule_of(user, graph).operands[position][mark.dim]):
                return None
    return marks
