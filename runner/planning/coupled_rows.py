"""Where a loss takes rows of the batch together, other than in a mean: there the mean over micro-batches is not the
loss of one batch (contrastive losses, batch norm, statistics of the batch, losses that add up rows).

The sharding rules say where rows are: a factor of an operand's dim that results have, too, is that of rows, and one
that they do not have is added up. An operator with a rule that leaves rows unsliced works along them. Where rows are
moved out of sight (a view that splits them, an index), nothing is found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.planning.counted import ADDITIVE, DIVISIONS, ELEMENTWISE, MOVES, PRODUCTS, SUMMED, dependencies
from strategies.capture.constants import OF_SHAPES
from strategies.core.graph import Operator, OperatorGraph, Ref, Source
from strategies.lowering.batch_splits import depends_on_other_rows
from strategies.rules import rule_of
from strategies.rules.losses import SUM
from strategies.rules.registry import arguments
from strategies.rules.sharding import Sharding

LINEAR = PRODUCTS | {"addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "mv"}
"""Linear in one operand."""
SUMS = frozenset({"add", "sub", "subtract"})
TERMS = MOVES | SUMS | frozenset({"mean", "neg", "negative", "positive", "sum"})
"""Operators that leave a sum of terms one, whatever they add up or average that is no row."""
CONTRACTIONS = (LINEAR - PRODUCTS) | {"dot", "inner", "vdot"}
LOOKUPS = frozenset("embedding gather index index_select take".split())
JOINS = frozenset({"cat", "concat", "concatenate", "vstack"})
"""Their result holds rows in the dim along which they join."""
BATCH_NORM = "batch_norm_training"
UNMIXED = (MOVES - {"slice"}) | JOINS | {"_grouped_mm", "repeat", "stack", "unbind"}
"""Operators of torch that may leave rows unsliced and take none together."""


def coupled(graph: OperatorGraph, unbatched: Collection[str]) -> Operator | None:
    """The first operator on the way to the loss that takes several rows together, but for sums and means; None if none
    is found.

    Args:
        graph: of a step, from the entries of a micro-batch to the loss.
        unbatched: the names of entries without rows.
    """
    rows = _rows_of_inputs(graph, unbatched)
    reduced: set[Ref] = set()  # sums and means over rows, counts too
    used = set[str]().union(*(dependencies(graph, ref) for ref in graph.outputs))
    for operator, sharding, factors, kept in _rules_over_rows(graph, rows):
        if operator.id not in used:
            continue
        every = [Ref(operator.id, index) for index in range(len(operator.results))]
        results = [ref for ref in every if graph.specs[ref].floating]
        of_reduced = [ref for ref in operator.operands if ref in reduced]
        counting = [ref for ref in of_reduced if graph.specs[ref].floating or operator.op in DIVISIONS]
        if sharding is None:
            if counting and results and not _is_linear(graph, operator, counting):
                return operator
            reduced.update(every if of_reduced and operator.op not in OF_SHAPES else ())
            continue
        if None in factors or not sharding.known:
            scalar = not any(one.shape for one in operator.results)
            works_along = operator.target.startswith("aten.") and operator.op not in UNMIXED
            if results and (works_along if sharding.known else scalar):
                return operator
            continue
        if counting and results:
            return operator
        if len(factors) > 1 and operator.op in LINEAR | ELEMENTWISE | {"cdist"}:
            return operator
        if len(factors) > 1 or operator.op in LOOKUPS:  # these may stay in their rows
            continue
        (factor,) = factors
        assert factor is not None
        if kept and sharding.fits(factor, 2) and depends_on_other_rows(operator, factor, graph, 2):
            return operator
        if not kept and results and factor not in sharding.sums:
            return operator
        reduced.update(ref for ref in every if ref not in kept)
    return None


@dataclass(frozen=True)
class RowSum:
    """A term of a loss that adds up rows, and the numbers by which that is multiplied and divided."""

    operator: Operator
    factors: tuple[float, ...]


def row_sums(graph: OperatorGraph, unbatched: Collection[str]) -> tuple[list[RowSum], bool]:
    """The terms of a loss that add up rows if their factors do not follow from the number of rows, in order, and
    whether all terms do."""
    adding, rows = _adding_rows(graph, unbatched)
    by_batch = _following(graph, graph.of_kind("input"))
    by_constants = _following(graph, graph.of_kind("constant"))
    found, alone = list[RowSum](), True
    waiting: list[tuple[Ref, tuple[float, ...]]] = [(ref, ()) for ref in graph.outputs]
    while waiting:
        ref, factors = waiting.pop()
        node = graph.by_id[ref.id]
        if node.id in adding:
            assert isinstance(node, Operator)
            found.append(RowSum(node, factors))
            continue
        if not isinstance(node, Operator) or not rows.keys().isdisjoint(node.operands):
            alone = False
            continue
        numbers = tuple(float(one) for one in node.args if isinstance(one, int | float))
        scaled = [one for one in node.operands if one.id in by_batch]
        if node.op in PRODUCTS | DIVISIONS and len(scaled) == 1 and (node.op in PRODUCTS or node.args[0] == scaled[0]):
            alone &= all(one.id not in by_constants for one in node.operands if one != scaled[0])
            waiting.append((scaled[0], factors + numbers))
        elif node.op in TERMS:
            alone &= node.op not in SUMS or not numbers
            factors += tuple(float(one) for one in node.keywords.values() if isinstance(one, int | float))
            waiting += [(one, factors) for one in node.operands]
        else:
            alone = False
    return found[::-1], alone


def _following(graph: OperatorGraph, sources: Iterable[Source]) -> set[str]:
    """The ids of `sources` and of all that follows from them."""
    found = {one.id for one in sources}
    for operator in graph.operators:
        if any(ref.id in found for ref in operator.operands):
            found.add(operator.id)
    return found


def _adding_rows(graph: OperatorGraph, unbatched: Collection[str]) -> tuple[set[str], dict[Ref, int]]:
    """The ids of operators that add up rows, and the dims that hold rows."""
    rows, adding = _rows_of_inputs(graph, unbatched), set[str]()
    for operator, sharding, factors, kept in _rules_over_rows(graph, rows):
        if sharding is not None and sharding.known and len(factors) == 1 and not kept:
            adds = operator.op in SUMMED | CONTRACTIONS or _given(operator).get("reduction") == SUM
            if adds and not factors.isdisjoint(sharding.sums):
                adding.add(operator.id)
    return adding, rows


def _rules_over_rows(
    graph: OperatorGraph, rows: dict[Ref, int]
) -> Iterator[tuple[Operator, Sharding | None, set[str | None], dict[Ref, int]]]:
    """Each operator with its rule, the factors of the dims of operands that hold rows (None: the rule has none there),
    and the dims of results that hold them, which `rows` gets; no rule where no operand has rows."""
    for operator in graph.operators:
        if rows.keys().isdisjoint(operator.operands):
            yield operator, None, set(), {}
            continue
        sharding = rule_of(operator, graph)
        pairs = zip(operator.operands, sharding.operands, strict=True)
        factors = {dims[rows[ref]] for ref, dims in pairs if ref in rows}
        results = enumerate(sharding.results) if sharding.known and None not in factors else ()
        found = {Ref(operator.id, at): [dim for dim, one in enumerate(dims) if one in factors] for at, dims in results}
        kept = {ref: dims[0] for ref, dims in found.items() if len(dims) == 1}  # of an index and a table, the index's
        if operator.op in JOINS and sharding.known:
            kept = {Ref(operator.id): dim for dim in {rows[ref] for ref in operator.operands if ref in rows}}
        yield operator, sharding, factors, kept
        rows |= kept


def _rows_of_inputs(graph: OperatorGraph, unbatched: Collection[str]) -> dict[Ref, int]:
    """The dims that hold rows."""
    inputs = graph.of_kind("input")
    return {Ref(one.id): 0 for one in inputs if one.spec.shape and one.name not in unbatched}


def _given(operator: Operator) -> dict[str, Any]:
    """The arguments by name; nothing of functions without a schema."""
    return dict(arguments(operator)) if operator.target.startswith("aten.") else {}


def _is_linear(graph: OperatorGraph, operator: Operator, reduced: Sequence[Ref]) -> bool:
    """Whether a result is linear in operands that are sums or means over rows. Scalars count as linear here, since
    `nonlinear_in_means` finds functions of these."""
    if not any(graph.specs[ref].shape for ref in operator.operands):
        return True
    if operator.op in LINEAR:
        return len(reduced) == 1
    if operator.op in DIVISIONS:
        return len(reduced) == 1 and operator.args[0] == reduced[0]
    return operator.op in ADDITIVE | MOVES | SUMMED | {"mean"}
