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

from collections.abc import Iterator, Sequence
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
    rewrite,
    with_leaves,
)
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import RankValue, Redistribute
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.rules.random import draws
from strategies.rules.registry import RULES
from strategies.rules.traits import traits

LARGEST = 0.25
"""The largest share of the work that may run on the complete batch."""


@dataclass(frozen=True)
class BatchSplits:
    """`graph` with every copy's operators, and the `plan` that gives them what `plan` of the model gave the model's."""

    graph: OperatorGraph
    plan: Plan


def in_copies(
    graph: OperatorGraph, part: OperatorGraph, plan: Plan, count: int, rows: int, *, exact: bool = False
) -> BatchSplits:
    """The model in `count` copies. `part` is the model's graph for the `rows` of one copy; `exact` says that random
    operators must repeat the numbers of one device.

    Raises StrategyError, naming the operator, where most of the work mixes rows, where a copy's rows cannot be cut as
    the plan cuts the batch's, and for random operators that cannot be exact in copies.
    """
    return _Copying(graph, part, plan, count, rows, exact).copies()


class _Copying:
    def __init__(
        self, graph: OperatorGraph, part: OperatorGraph, plan: Plan, count: int, rows: int, exact: bool
    ) -> None:
        self.graph, self.part, self.plan = graph, part, plan
        self.count, self.rows, self.exact = count, rows, exact
        self.dims: dict[Ref, int] = {}  # which dim carries the rows
        self.odd: set[Ref] = set()  # values whose shape depends on the rows in another way
        self.moving: set[Ref] = set()  # batch entries, and what each copy computes by itself
        self.joined: set[str] = set()  # operators that depend on the batch and see all of it
        self.blamed: Operator | None = None
        self._check_alike()
        for source, small in zip(graph.sources, part.sources, strict=True):
            self._carry(Ref(source.id), source.spec, small.spec)
            if source.kind == "input" and Ref(source.id) in self.dims:
                self.moving.add(Ref(source.id))
        for operator, small_one in zip(graph.operators, part.operators, strict=True):
            self._judge(operator, small_one)
        self._check_work()

    def _check_alike(self) -> None:
        pairs = zip(self.graph.operators, self.part.operators, strict=False)
        odd = next((a for a, b in pairs if (a.id, a.target) != (b.id, b.target)), None)
        if odd is not None or len(self.graph.operators) != len(self.part.operators):
            where = "at its end" if odd is None else f"at {odd.where}"
            raise StrategyError(
                "MW440",
                f"parallel.copies = {self.count}: the model computes something else for {self.rows} rows than for "
                f"{self.rows * self.count}, {where}, so the batch cannot be divided; use parallel.copies=1.",
            )

    def _carry(self, ref: Ref, spec: TensorSpec, small: TensorSpec) -> None:
        if spec == small:
            return
        differ = [dim for dim, (a, b) in enumerate(zip(spec.shape, small.shape, strict=False)) if a != b]
        if len(differ) == 1 and len(spec.shape) == len(small.shape):
            size, total = spec.shape[differ[0]], self.rows * self.count
            if size == small.shape[differ[0]] * self.count and size % total == 0:
                self.dims[ref] = differ[0]
                return
        self.odd.add(ref)

    def _judge(self, operator: Operator, small: Operator) -> None:
        """Whether each copy computes an operator for itself, or it is computed once."""
        results = [Ref(operator.id, index) for index in range(len(operator.results))]
        for ref, spec, other in zip(results, operator.results, small.results, strict=True):
            self._carry(ref, spec, other)
        mixed = any(ref.id in self.joined for ref in operator.operands)
        if mixed or self.moving.isdisjoint(operator.operands):
            if mixed:
                self.joined.add(operator.id)
            return
        if self._by_rows(operator, small):
            self.moving.update(results)
            return
        self.joined.add(operator.id)
        if self.blamed is None and any(ref in self.dims or ref in self.odd for ref in results):
            self.blamed = operator

    def _by_rows(self, operator: Operator, small: Operator) -> bool:
        sharding = rule_of(operator, self.graph)
        carriers = [(ref, dims) for ref, dims in zip(operator.operands, sharding.operands, strict=True)]
        factors = {dims[self.dims[ref]] for ref, dims in carriers if ref in self.dims}
        if len(factors) != 1 or None in factors or any(ref in self.odd for ref in operator.operands):
            return False
        (factor,) = factors
        assert factor is not None
        others = any(factor in dims for ref, dims in carriers if ref not in self.dims)
        passes = all(
            self.dims.get(Ref(operator.id, index)) == (dims.index(factor) if factor in dims else None)
            and factor in dims
            for index, dims in enumerate(sharding.results)
        )
        if others or not passes or factor in sharding.sums or not sharding.fits(factor, self.count):
            return False
        if not traits(operator.op).sized and (operator.args, operator.kwargs) != (small.args, small.kwargs):
            return False
        return not self._looks_around(operator, factor)

    def _looks_around(self, operator: Operator, factor: str) -> bool:
        """Whether a slice of `factor` sends anything or needs its position (as random operators do)."""
        sharding, mesh = rule_of(operator, self.graph), Mesh((("rows", self.count),))
        assignment = {factor: ("rows",)}
        specs, layouts = self.graph.operand_specs(operator), sharding.operand_layouts(assignment)
        sources = tuple(Source(f"operand_{i}", "input", f"operand_{i}", spec) for i, spec in enumerate(specs))
        given = iter(sources)

        def own(leaf: Any) -> Any:
            return Ref(next(given).id) if isinstance(leaf, Ref) else leaf

        alone = with_leaves(operator, own)
        results = tuple(Ref(operator.id, index) for index in range(len(operator.results)))
        inputs = {source.name: layout for source, layout in zip(sources, layouts, strict=True)}
        plan = Plan(mesh, {operator.name: OperatorPlan(assignment, "default")}, inputs, {})
        graph = OperatorGraph(sources, (alone,), results, ())
        program = lower(graph, plan, outputs=sharding.result_layouts(assignment))
        if any(isinstance(one, Redistribute) for one in program.instructions):
            return True
        return not draws(operator) and any(
            isinstance(leaf, RankValue) and leaf.axes
            for one in program.instructions
            for leaf in leaves((getattr(one, "args", ()), getattr(one, "kwargs", ())))
        )

    def _check_work(self) -> None:
        work = {operator.id: rule_of(operator, self.graph).flops for operator in self.graph.operators}
        apart = sum(work[ref.id] for ref in self.moving if ref.id in work)
        whole = sum(work[id] for id in self.joined)
        if not apart or whole > LARGEST * (apart + whole):
            what = self.blamed or next((o for o in self.graph.operators if o.id in self.joined), None)
            cause = "no operator takes the batch row by row" if what is None else f"{what.where} mixes the rows"
            raise StrategyError(
                "MW440",
                f"parallel.copies = {self.count}: {cause} of the batch, and {whole / max(apart + whole, 1.0):.0%} of "
                "the work on the batch is done there or depends on it, which copies cannot compute by themselves. Use "
                "parallel.copies=1, or an operator that treats every row by itself.",
            )
        for operator in self.graph.operators if self.exact else ():
            if Ref(operator.id) in self.moving and draws(operator) and not traits(operator.op).draws_rows:
                raise StrategyError(
                    "MW440",
                    f"parallel.copies = {self.count} and train.random = 'exact' do not go together for "
                    f"{operator.where}: what a copy draws for its rows cannot be what one device draws. Use "
                    "parallel.copies=1 or train.random=fast.",
                )

    def copies(self) -> BatchSplits:
        """Build the graph: every operator in its place, once or once per copy."""
        building = _Building(self)
        for operator, small in zip(self.graph.operators, self.part.operators, strict=True):
            if any(Ref(operator.id, index) in self.moving for index in range(len(operator.results))):
                for number in range(self.count):
                    building.copy(operator, small, number)
            else:
                building.once(operator)
        return building.finished()


class _Building:
    """The new graph and its plan while they grow."""

    def __init__(self, judged: _Copying) -> None:
        self.judged, self.graph, self.plan = judged, judged.graph, judged.plan
        self.count, self.rows = judged.count, judged.rows
        self.operators: list[Operator] = []
        self.planned: dict[str, OperatorPlan] = {}
        self.specs: dict[Ref, TensorSpec] = {Ref(source.id): source.spec for source in self.graph.sources}
        self.layouts: dict[Ref, Layout] = {}
        self.own: dict[tuple[Ref, int], Ref] = {}  # (value, copy) -> the copy's
        self.whole: dict[Ref, Ref] = {}
        self.taken = {*self.graph.by_id}
        for source in self.graph.sources:
            layout = self.plan.inputs if source.kind == "input" else self.plan.tensors
            self.layouts[Ref(source.id)] = layout[source.name]
            if any(True for _ in self._takers(Ref(source.id))):
                self._split(Ref(source.id), source.name, "", "", ())

    def _takers(self, ref: Ref) -> Iterator[tuple[Operator, int]]:
        """The operators that are computed per copy and use a value."""
        for operator, position in self.graph.users[ref]:
            if not self.judged.moving.isdisjoint(Ref(operator.id, i) for i in range(len(operator.results))):
                yield operator, position

    def once(self, operator: Operator) -> None:
        """An operator for all copies, and its results' rows for each copy that uses them."""
        new = lambda leaf: self._whole(leaf) if isinstance(leaf, Ref) else leaf  # noqa: E731
        self._append(
            with_leaves(operator, new),
            self.plan.operators[operator.name],
            self._result_layouts(operator),
        )
        for index in range(len(operator.results)):
            ref = Ref(operator.id, index)
            if ref in self.judged.dims and any(True for _ in self._takers(ref)):
                self._split(ref, operator.name, operator.module, operator.source, operator.path, index)

    def copy(self, operator: Operator, small: Operator, number: int) -> None:
        """Emit split `number`; after the last one, also the value of the complete batch if it is needed."""
        chosen, sharding = self.plan.operators[operator.name], rule_of(small, self.judged.part)
        if not sharding.legal(chosen.assignment, self.plan.mesh):
            raise StrategyError(
                "MW440",
                f"parallel.copies = {self.count} leaves {self.rows} rows of a micro-batch to each copy, which cannot "
                f"be cut as the strategy of {operator.where} cuts {self.rows * self.count}; take fewer copies or a "
                "larger data.batch_size.",
            )
        dim = next(self.judged.dims[Ref(operator.id, i)] for i in range(len(operator.results)))
        share = BatchSlice(number, self.count, dim, self.rows, operator.id, operator.name)
        given = small if traits(operator.op).sized else operator
        new = lambda leaf: self._own(leaf, number) if isinstance(leaf, Ref) else leaf  # noqa: E731
        made = replace(
            operator,
            id=self._fresh(f"{operator.id}_copy{number}"),
            name=f"{operator.name}~{number}",
            args=rewrite(given.args, new),
            kwargs=rewrite(given.kwargs, new),
            results=small.results,
            batch_slice=share,
        )
        self._append(made, chosen, self._result_layouts(operator))
        for index in range(len(operator.results)):
            self.own[Ref(operator.id, index), number] = Ref(made.id, index)
        if number == self.count - 1:
            for index in range(len(operator.results)):
                ref = Ref(operator.id, index)
                users = {user.id for user, _ in self.graph.users[ref]} - {user.id for user, _ in self._takers(ref)}
                wanted = ref in self.graph.outputs or any(ref == value for _, value in self.graph.updates)
                if users or wanted:
                    self.whole[ref] = self._join(ref, operator, index)

    def finished(self) -> BatchSplits:
        graph = replace(
            self.graph,
            operators=tuple(self.operators),
            outputs=tuple(self._whole(ref) for ref in self.graph.outputs),
            updates=tuple((id, self._whole(ref)) for id, ref in self.graph.updates),
        )
        recompute = self.plan.recompute
        if recompute is not None:
            of = {
                operator.name: operator.batch_slice.name
                for operator in self.operators
                if operator.batch_slice is not None
            }
            kept = tuple(name for name in self.planned if of.get(name, name) in recompute.kept)
            recompute = replace(recompute, kept=kept)
        return BatchSplits(graph, replace(self.plan, operators=self.planned, recompute=recompute))

    def _result_layouts(self, operator: Operator) -> tuple[Layout, ...]:
        chosen = self.plan.operators[operator.name]
        return chosen.outputs or rule_of(operator, self.graph).result_layouts(chosen.assignment)

    def _whole(self, ref: Ref) -> Ref:
        return self.whole.get(ref, ref)

    def _own(self, ref: Ref, number: int) -> Ref:
        return self.own.get((ref, number), ref)

    def _split(self, ref: Ref, name: str, module: str, source: str, path: tuple[str, ...], index: int = 0) -> None:
        """Split a value of the complete batch into the rows of each split."""
        if ref not in self.judged.dims:
            return
        shape, dim = self.specs[ref].shape, self.judged.dims[ref]
        inner = shape[dim] // (self.rows * self.count)
        about = Operator("", f"{name}~{index}", module, "", "", (), (), (), False, source, path)
        deep = (*shape[:dim], self.rows, self.count, *((inner,) if inner > 1 else ()), *shape[dim + 1 :])
        rows = self._call(replace(about, name=f"{about.name}~rows"), "view", ref, deep)
        apart = (*deep[: dim + 1], *deep[dim + 2 :])
        found = self._unbind(replace(about, name=f"{about.name}~split"), rows, dim + 1, apart)
        for number, piece in enumerate(found):
            if inner > 1:
                flat = (*shape[:dim], self.rows * inner, *shape[dim + 1 :])
                share = BatchSlice(number, self.count, dim, self.rows, "", about.name)
                piece = self._call(
                    replace(about, name=f"{about.name}~flat{number}", batch_slice=share), "view", piece, flat
                )
            self.own[ref, number] = piece

    def _join(self, ref: Ref, operator: Operator, index: int) -> Ref:
        """Concatenate the splits' rows to the value of the complete batch."""
        shape, dim = operator.results[index].shape, self.judged.dims[ref]
        inner = shape[dim] // (self.rows * self.count)
        about = replace(operator, name=f"{operator.name}~{index}", multiple=False, args=(), kwargs=())
        pieces = [self.own[ref, number] for number in range(self.count)]
        if inner > 1:
            deep = (*shape[:dim], self.rows, inner, *shape[dim + 1 :])
            shares = [BatchSlice(n, self.count, dim, self.rows, operator.id, operator.name) for n in range(self.count)]
            pieces = [
                self._call(replace(about, name=f"{about.name}~deep{n}", batch_slice=shares[n]), "view", piece, deep)
                for n, piece in enumerate(pieces)
            ]
        own = self.specs[pieces[0]].shape
        stacked = TensorSpec((*own[: dim + 1], self.count, *own[dim + 1 :]), self.specs[pieces[0]].dtype)
        together = self._made(
            replace(about, name=f"{about.name}~stack", op="stack", target="aten.stack.default"),
            (pieces, dim + 1),
            (stacked,),
            pieces,
        )
        return self._call(replace(about, name=f"{about.name}~join"), "view", Ref(together.id), shape)

    def _call(self, about: Operator, op: str, value: Ref, shape: Sequence[int]) -> Ref:
        spec = TensorSpec(tuple(shape), self.specs[value].dtype)
        about = replace(about, op=op, target=f"aten.{op}.default")
        return Ref(self._made(about, (value, list(shape)), (spec,), [value]).id)

    def _unbind(self, about: Operator, value: Ref, dim: int, shape: Sequence[int]) -> list[Ref]:
        specs = (TensorSpec(tuple(shape), self.specs[value].dtype),) * self.count
        about = replace(about, op="unbind", target="aten.unbind.int", multiple=True)
        made = self._made(about, (value, dim), specs, [value])
        return [Ref(made.id, number) for number in range(self.count)]

    def _made(
        self, about: Operator, args: tuple[Any, ...], results: tuple[TensorSpec, ...], operands: Sequence[Ref]
    ) -> Operator:
        """A new operator with the slices of its operands."""
        id = self._fresh(f"{operands[0].id}_{about.op}")
        made = replace(about, id=id, args=args, kwargs=(), results=results)
        sharding = RULES[about.op](made, [self.specs[ref] for ref in operands])
        assert sharding is not None
        assignment: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for factor, axes in zip(sharding.operands[0], self.layouts[operands[0]].dims, strict=True):
            if factor is not None and axes and used.isdisjoint(axes) and sharding.fits(factor, self._slices(axes)):
                assignment[factor] = axes
                used.update(axes)
        self._append(made, OperatorPlan(assignment, "copies"), sharding.result_layouts(assignment))
        return made

    def _slices(self, axes: Sequence[str]) -> int:
        return self.plan.mesh.product(axes)

    def _append(self, operator: Operator, planned: OperatorPlan, layouts: Sequence[Layout]) -> None:
        self.operators.append(operator)
        self.planned[operator.name] = planned
        for index, (spec, layout) in enumerate(zip(operator.results, layouts, strict=True)):
            self.specs[Ref(operator.id, index)] = spec
            self.layouts[Ref(operator.id, index)] = layout

    def _fresh(self, name: str) -> str:
        name = fresh(name, self.taken)
        self.taken.add(name)
        return name
