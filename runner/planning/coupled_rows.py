"""Where a loss takes rows of the batch together, other than in a mean: there the mean over micro-batches is not the
loss of one batch (contrastive losses, batch norm, statistics of the batch, losses that add up rows).

The sharding rules say where rows are: a factor of an operand's dim that results have, too, is that of rows, and one
that they do not have is added up. Invariant: what is found takes several rows together; where rules leave rows
unsliced, nothing is known and nothing is found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from runner.planning.counted import ADDITIVE, DIVISIONS, ELEMENTWISE, MOVES, PRODUCTS, SUMMED, dependencies
from strategies.core.graph import Operator, OperatorGraph, Ref
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
UNSLICED = frozenset("argsort kthvalue log_softmax median nanmean nanmedian quantile roll softmax sort topk".split())
"""Operators that are not sliced along the dim along which they work."""


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
    for operator in graph.operators:
        if operator.id not in used:
            continue
        every = [Ref(operator.id, index) for index in range(len(operator.results))]
        results = [ref for ref in every if graph.specs[ref].floating]
        of_reduced = [ref for ref in operator.operands if ref in reduced]
        counting = [ref for ref in of_reduced if graph.specs[ref].floating or operator.op in DIVISIONS]
        if not any(ref in rows for ref in operator.operands):
            if counting and results and not _is_linear(graph, operator, counting):
                return operator
            reduced.update(every if of_reduced else ())
            continue
        sharding = rule_of(operator, graph)
        factors = _factors(operator, sharding, rows)
        if None in factors or not sharding.known:
            scalar = results and not any(one.shape for one in operator.results)
            if (scalar and not sharding.known) or (operator.op in UNSLICED and _along_rows(graph, operator, rows)):
                return operator
            continue
        if counting and results:
            return operator
        if len(factors) > 1 and operator.op in LINEAR | ELEMENTWISE | {"cdist"}:  # an index may stay in its row
            return operator
        if len(factors) > 1:
            continue
        (factor,) = factors
        assert factor is not None
        kept = {Ref(operator.id, at): dims.index(factor) for at, dims in enumerate(sharding.results) if factor in dims}
        if kept and sharding.fits(factor, 2) and depends_on_other_rows(operator, factor, graph, 2):
            return operator
        if not kept and results and factor not in sharding.sums:
            return operator
        rows |= kept
        reduced.update(ref for ref in every if ref not in kept)
    return None


def added_up(graph: OperatorGraph, unbatched: Collection[str]) -> Operator | None:
    """An operator that adds up rows, whose result is an unscaled term of the loss."""
    adding, _ = _adding_rows(graph, unbatched)
    waiting = [ref.id for ref in graph.outputs]
    while waiting:
        node = graph.by_id[waiting.pop()]
        if isinstance(node, Operator) and node.id in adding:
            return node
        if isinstance(node, Operator) and node.op in ADDITIVE and not node.results[0].shape:
            waiting += [ref.id for ref in node.operands]
    return None


def factors_of_sums(graph: OperatorGraph, unbatched: Collection[str]) -> tuple[float, ...] | None:
    """The numbers by which a loss multiplies and divides its terms, where each term adds up rows: the loss of a batch
    is the sum of those of its parts if these are the same for any number of rows. None for another loss."""
    adding, rows = _adding_rows(graph, unbatched)
    numbers: list[float] = []
    waiting = [*graph.outputs]
    while waiting:
        node = graph.by_id[waiting.pop().id]
        if node.id in adding:
            continue
        if not isinstance(node, Operator) or not rows.keys().isdisjoint(node.operands):
            return None
        given = [one for one in (*node.args, *node.keywords.values()) if isinstance(one, int | float)]
        if node.op in PRODUCTS | DIVISIONS and len(node.operands) == 1:
            numbers += given
        elif node.op not in TERMS or (node.op in SUMS and (given or len(node.operands) != len(node.args))):
            return None
        waiting += node.operands
    return tuple(numbers)


def _adding_rows(graph: OperatorGraph, unbatched: Collection[str]) -> tuple[set[str], dict[Ref, int]]:
    """The ids of operators that add up rows, and the dims that hold rows."""
    rows, adding = _rows_of_inputs(graph, unbatched), set[str]()
    for operator in graph.operators:
        sharding = rule_of(operator, graph)
        factors = _factors(operator, sharding, rows)
        if len(factors) == 1 and (factor := next(iter(factors))) is not None and sharding.known:
            results = enumerate(sharding.results)
            found = {Ref(operator.id, at): dims.index(factor) for at, dims in results if factor in dims}
            rows |= found
            adds = operator.op in SUMMED or _given(operator).get("reduction") == SUM
            if adds and not found and factor in sharding.sums:
                adding.add(operator.id)
    return adding, rows


def _rows_of_inputs(graph: OperatorGraph, unbatched: Collection[str]) -> dict[Ref, int]:
    """The dims that hold rows."""
    inputs = graph.of_kind("input")
    return {Ref(one.id): 0 for one in inputs if one.spec.shape and one.name not in unbatched}


def _factors(operator: Operator, sharding: Sharding, rows: Mapping[Ref, int]) -> set[str | None]:
    """The factors of the dims of operands that hold rows; None: the rule has none there."""
    pairs = zip(operator.operands, sharding.operands, strict=True)
    return {dims[rows[ref]] for ref, dims in pairs if ref in rows}


def _given(operator: Operator) -> dict[str, Any]:
    """The arguments by name; nothing of functions without a schema."""
    return dict(arguments(operator)) if operator.target.startswith("aten.") else {}


def _along_rows(graph: OperatorGraph, operator: Operator, rows: Mapping[Ref, int]) -> bool:
    """Whether an operator works along the dim of the rows, or all dims."""
    given, ref = _given(operator), operator.operands[0]
    dims, rank = given.get("dim", given.get("dims")), len(graph.specs[ref].shape)
    every = [dims] if isinstance(dims, int) else dims or range(rank)
    return any(dim % rank == rows.get(ref) for dim in every)


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
