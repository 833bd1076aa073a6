"""Batch splits inside one step (interleaved micro-batches): a graph of the same model with operators once per split.

Split k takes the rows k, k + count, ... of the batch, so its rows stay on the ranks of the batch. An operator that
works on each row independently appears once per split; one that does not depend on the batch appears once for all.
Where rows mix, which is at the loss, the splits are concatenated in order and the rest runs once on the complete batch,
so means, ignored labels and weights are those of one batch. Invariant: the graph computes what the model computes, in
any plan; random operators know which rows they draw for.

The sharding rule says whether an operator works on each row independently: it can then be sliced along the rows without
communication and without knowing the position of its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strategies.core.errors import StrategyError
from strategies.core.graph import (
    BatchSlice,
    Operator,
    OperatorGraph,
    Ref,
    Source,
    TensorSpec,
    fresh,
    leaves,
    refs,
    with_refs,
)
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import Compute, RankValue, Redistribute
from strategies.lowering.lowering import local_instructions
from strategies.rules import rule_of, sharding_of
from strategies.rules.random import draws
from strategies.rules.traits import traits

LARGEST = 0.25
"""The largest share of the work that may run on the complete batch."""
TARGETS = {"view": "aten.view.default", "unbind": "aten.unbind.int", "stack": "aten.stack.default"}


@dataclass(frozen=True)
class BatchSplits:
    """`graph` has an operator per split, and `plan` gives it what the model's plan gives the model's operator."""

    graph: OperatorGraph
    plan: Plan


def split_batch(
    graph: OperatorGraph, part: OperatorGraph, plan: Plan, count: int, rows: int, *, exact: bool = False
) -> BatchSplits:
    """Split the batch of a model.

    Args:
        graph: the model.
        part: the model for the rows of one split.
        plan: the plan of `graph`.
        count: number of splits.
        rows: rows of a split.
        exact: random operators must repeat the numbers of one device.

    Raises:
        StrategyError: most of the work mixes rows, the rows of a split cannot be cut as the plan cuts the batch's, or
            random operators cannot be exact in splits. Names the operator.
    """
    return _Splitting(graph, part, plan, count, rows, exact).result()


def depends_on_other_rows(operator: Operator, factor: str, graph: OperatorGraph, count: int) -> bool:
    """Whether one of `count` slices of `factor` sends anything or needs its position (as random operators do)."""
    mesh = Mesh((("rows", count),))
    instructions = local_instructions(operator, rule_of(operator, graph), {factor: ("rows",)}, graph, mesh)
    if any(isinstance(instruction, Redistribute) for instruction in instructions):
        return True
    calls = [(step.args, step.kwargs) for step in instructions if isinstance(step, Compute)]
    return not draws(operator) and any(isinstance(leaf, RankValue) and leaf.axes for leaf in leaves(calls))


class _Splitting:
    """What each operator does with the rows of the batch; then the new graph and its plan while they grow."""

    def __init__(
        self, graph: OperatorGraph, part: OperatorGraph, plan: Plan, count: int, rows: int, exact: bool
    ) -> None:
        self.graph, self.part, self.plan = graph, part, plan
        self.count, self.rows, self.exact = count, rows, exact
        self.dims: dict[Ref, int] = {}  # which dim carries the rows
        self.odd: set[Ref] = set()  # values whose shape depends on the rows in another way
        self.split: set[str] = set()  # batch entries, and operators that each split computes by itself
        self.joined: set[str] = set()  # operators that depend on the batch and see all of it
        self.mixing: Operator | None = None  # the first of them whose results have rows
        self._check_same_operators()
        for source, small in zip(graph.sources, part.sources, strict=True):
            self._find_rows(Ref(source.id), source.spec, small.spec)
            if source.kind == "input" and Ref(source.id) in self.dims:
                self.split.add(source.id)
        for operator, smaller in zip(graph.operators, part.operators, strict=True):
            self._classify(operator, smaller)
        self._check_work()
        self.operators: list[Operator] = []
        self.planned: dict[str, OperatorPlan] = {}
        self.specs: dict[Ref, TensorSpec] = {Ref(source.id): source.spec for source in graph.sources}
        self.layouts: dict[Ref, Layout] = {}
        self.rows_of: dict[tuple[Ref, int], Ref] = {}  # (value, split) -> the split's
        self.complete: dict[Ref, Ref] = {}
        self.taken = {*graph.by_id}

    def _check_same_operators(self) -> None:
        pairs = zip(self.graph.operators, self.part.operators, strict=False)
        odd = next((a for a, b in pairs if (a.id, a.target) != (b.id, b.target)), None)
        if odd is not None or len(self.graph.operators) != len(self.part.operators):
            where = "at its end" if odd is None else f"at {odd.where}"
            raise StrategyError(
                "MW440",
                f"parallel.copies = {self.count}: the model computes something else for {self.rows} rows than for "
                f"{self.rows * self.count}, {where}, so the batch cannot be divided; use parallel.copies=1.",
            )

    def _find_rows(self, ref: Ref, spec: TensorSpec, small: TensorSpec) -> None:
        if spec == small:
            return
        differ = [dim for dim, (a, b) in enumerate(zip(spec.shape, small.shape, strict=False)) if a != b]
        if len(differ) == 1 and len(spec.shape) == len(small.shape):
            size = spec.shape[differ[0]]
            if size == small.shape[differ[0]] * self.count and size % (self.rows * self.count) == 0:
                self.dims[ref] = differ[0]
                return
        self.odd.add(ref)

    def _classify(self, operator: Operator, small: Operator) -> None:
        results = [Ref(operator.id, index) for index in range(len(operator.results))]
        for ref, spec, other in zip(results, operator.results, small.results, strict=True):
            self._find_rows(ref, spec, other)
        if any(ref.id in self.joined for ref in operator.operands):
            self.joined.add(operator.id)
        elif not any(ref.id in self.split for ref in operator.operands):
            return
        elif self._by_rows(operator, small):
            self.split.add(operator.id)
        else:
            self.joined.add(operator.id)
            if self.mixing is None and any(ref in self.dims or ref in self.odd for ref in results):
                self.mixing = operator

    def _by_rows(self, operator: Operator, small: Operator) -> bool:
        sharding = rule_of(operator, self.graph)
        carriers = [(dims, self.dims.get(ref)) for ref, dims in zip(operator.operands, sharding.operands, strict=True)]
        factors = {dims[dim] for dims, dim in carriers if dim is not None}
        factor = factors.pop() if len(factors) == 1 else None
        return (
            factor is not None
            and self.odd.isdisjoint(operator.operands)
            and not any(factor in dims for dims, dim in carriers if dim is None)
            and all(
                factor in dims and self.dims.get(Ref(operator.id, index)) == dims.index(factor)
                for index, dims in enumerate(sharding.results)
            )
            and factor not in sharding.sums
            and sharding.fits(factor, self.count)
            and (traits(operator.op).sized or (operator.args, operator.kwargs) == (small.args, small.kwargs))
            and not depends_on_other_rows(operator, factor, self.graph, self.count)
        )

    def _check_work(self) -> None:
        operators = {operator.id: operator for operator in self.graph.operators}
        work = {id: rule_of(operator, self.graph).flops for id, operator in operators.items()}
        separate = sum(work[id] for id in self.split if id in work)
        complete = sum(work[id] for id in self.joined)
        if not separate or complete > LARGEST * (separate + complete):
            what = self.mixing or next((operator for id, operator in operators.items() if id in self.joined), None)
            cause = "no operator takes the batch row by row" if what is None else f"{what.where} mixes the rows"
            raise StrategyError(
                "MW440",
                f"parallel.copies = {self.count}: {cause} of the batch, and "
                f"{complete / max(separate + complete, 1.0):.0%} of the work on the batch is done there or depends on "
                "it, which copies cannot compute by themselves. Use parallel.copies=1, or an operator that treats "
                "every row by itself.",
            )
        for id, operator in operators.items() if self.exact else ():
            if id in self.split and draws(operator) and not traits(operator.op).draws_rows:
                raise StrategyError(
                    "MW440",
                    f"parallel.copies = {self.count} and train.random = 'exact' do not go together for "
                    f"{operator.where}: what a copy draws for its rows cannot be what one device draws. Use "
                    "parallel.copies=1 or train.random=fast.",
                )

    def result(self) -> BatchSplits:
        for source in self.graph.sources:
            layout = self.plan.inputs if source.kind == "input" else self.plan.tensors
            self.layouts[Ref(source.id)] = layout[source.name]
            self._split_value(Ref(source.id))
        for operator, small in zip(self.graph.operators, self.part.operators, strict=True):
            if operator.id in self.split:
                self._once_per_split(operator, small)
            else:
                self._once(operator)
        graph = replace(
            self.graph,
            operators=tuple(self.operators),
            outputs=tuple(self.complete.get(ref, ref) for ref in self.graph.outputs),
            updates=tuple((id, self.complete.get(ref, ref)) for id, ref in self.graph.updates),
        )
        recompute = self.plan.recompute
        if recompute is not None:
            kept = tuple(
                operator.name
                for operator in self.operators
                if (operator.batch_slice.name if operator.batch_slice else operator.name) in recompute.kept
            )
            recompute = replace(recompute, kept=kept)
        return BatchSplits(graph, replace(self.plan, operators=self.planned, recompute=recompute))

    def _once(self, operator: Operator) -> None:
        """Emit an operator for all splits, and its results' rows for each split that uses them."""
        made = with_refs(operator, lambda ref: self.complete.get(ref, ref))
        self._append(made, self.plan.operators[operator.name], self._result_layouts(operator))
        for index in range(len(operator.results)):
            self._split_value(Ref(operator.id, index))

    def _once_per_split(self, operator: Operator, small: Operator) -> None:
        """Emit an operator for each split, and its results' complete values where they are needed."""
        chosen = self.plan.operators[operator.name]
        if not rule_of(small, self.part).legal(chosen.assignment, self.plan.mesh):
            raise StrategyError(
                "MW440",
                f"parallel.copies = {self.count} leaves {self.rows} rows of a micro-batch to each copy, which cannot "
                f"be cut as the strategy of {operator.where} cuts {self.rows * self.count}; take fewer copies or a "
                "larger data.batch_size.",
            )
        results = [Ref(operator.id, index) for index in range(len(operator.results))]
        sized = small if traits(operator.op).sized else operator
        dim = self.dims[results[0]]
        for number in range(self.count):
            made = with_refs(
                replace(operator, args=sized.args, kwargs=sized.kwargs),
                lambda ref: self.rows_of.get((ref, number), ref),  # noqa: B023
                id=fresh(f"{operator.id}_copy{number}", self.taken),
                name=f"{operator.name}~{number}",
                results=small.results,
                batch_slice=BatchSlice(number, self.count, dim, self.rows, operator.id, operator.name),
            )
            self._append(made, chosen, self._result_layouts(operator))
            self.rows_of |= {(ref, number): Ref(made.id, ref.index) for ref in results}
        leaving = {*self.graph.outputs, *(ref for _, ref in self.graph.updates)}
        for ref in results:
            if ref in leaving or any(user.id not in self.split for user, _ in self.graph.users[ref]):
                self.complete[ref] = self._join_value(ref)

    def _result_layouts(self, operator: Operator) -> tuple[Layout, ...]:
        chosen = self.plan.operators[operator.name]
        return chosen.outputs or rule_of(operator, self.graph).result_layouts(chosen.assignment)

    def _split_value(self, ref: Ref) -> None:
        """Split a value of the complete batch into the rows of each split that uses it."""
        if ref not in self.dims or not any(user.id in self.split for user, _ in self.graph.users[ref]):
            return
        shape, dim, about = self.specs[ref].shape, self.dims[ref], self._about(ref)
        inner = shape[dim] // (self.rows * self.count)
        deep = (*shape[:dim], self.rows, self.count, *((inner,) if inner > 1 else ()), *shape[dim + 1 :])
        rows = self._insert(about, "rows", "view", (ref, list(deep)), deep)
        pieces = self._insert(about, "split", "unbind", (rows, dim + 1), (*deep[: dim + 1], *deep[dim + 2 :]))
        flat = (*shape[:dim], self.rows * inner, *shape[dim + 1 :])
        share = BatchSlice(0, self.count, dim, self.rows, "", about.name)
        for number in range(self.count):
            piece = Ref(pieces.id, number)
            self.rows_of[ref, number] = self._reshape(about, "flat", piece, flat, share, number) if inner > 1 else piece

    def _join_value(self, ref: Ref) -> Ref:
        """Concatenate the splits' rows to the value of the complete batch."""
        shape, dim, about = self.specs[self.rows_of[ref, 0]].shape, self.dims[ref], self._about(ref)
        pieces = [self.rows_of[ref, number] for number in range(self.count)]
        if (inner := shape[dim] // self.rows) > 1:
            producer = self.graph.by_id[ref.id]
            shape = (*shape[:dim], self.rows, inner, *shape[dim + 1 :])
            share = BatchSlice(0, self.count, dim, self.rows, producer.id, producer.name)
            pieces = [self._reshape(about, "deep", piece, shape, share, n) for n, piece in enumerate(pieces)]
        stacked = (*shape[: dim + 1], self.count, *shape[dim + 1 :])
        together = self._insert(about, "stack", "stack", (pieces, dim + 1), stacked)
        complete = self.graph.specs[ref].shape
        return self._insert(about, "join", "view", (together, list(complete)), complete)

    def _reshape(
        self, about: Operator, suffix: str, piece: Ref, shape: Sequence[int], share: BatchSlice, number: int
    ) -> Ref:
        about = replace(about, batch_slice=replace(share, index=number))
        return self._insert(about, f"{suffix}{number}", "view", (piece, list(shape)), shape)

    def _about(self, ref: Ref) -> Operator:
        """An operator to be filled in, which stands where a value is made."""
        node = self.graph.by_id[ref.id]
        name = f"{node.name}~{ref.index}"
        if isinstance(node, Source):
            return Operator("", name, "", "", "", (), (), (), False, "", ())
        return replace(node, name=name, kwargs=(), multiple=False)

    def _insert(self, about: Operator, suffix: str, op: str, args: tuple[Any, ...], shape: Sequence[int]) -> Ref:
        """The first result, of `shape`, of a new operator with the slices of its operands."""
        operands = list(refs(args))
        spec = TensorSpec(tuple(shape), self.specs[operands[0]].dtype)
        made = replace(
            about,
            id=fresh(f"{operands[0].id}_{op}", self.taken),
            name=f"{about.name}~{suffix}",
            op=op,
            target=TARGETS[op],
            args=args,
            results=(spec,) * (self.count if op == "unbind" else 1),
            multiple=op == "unbind",
            lines=(),
        )
        sharding = sharding_of(made, [self.specs[ref] for ref in operands])
        assignment: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for factor, axes in zip(sharding.operands[0], self.layouts[operands[0]].dims, strict=True):
            fits = factor is not None and axes and sharding.fits(factor, self.plan.mesh.product(axes))
            if factor is not None and fits and used.isdisjoint(axes):
                assignment[factor] = axes
                used.update(axes)
        self._append(made, OperatorPlan(assignment, "copies"), sharding.result_layouts(assignment))
        return Ref(made.id)

    def _append(self, operator: Operator, planned: OperatorPlan, layouts: Sequence[Layout]) -> None:
        self.operators.append(operator)
        self.planned[operator.name] = planned
        for index, (spec, layout) in enumerate(zip(operator.results, layouts, strict=True)):
            self.specs[Ref(operator.id, index)] = spec
            self.layouts[Ref(operator.id, index)] = layout
