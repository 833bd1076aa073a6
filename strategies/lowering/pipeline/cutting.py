"""One operator graph and its plan -> the graph and plan of every stage.

A value that later stages use becomes an input of each stage up to the last that uses it; the stages between forward it.
It is sent in one layout of the mesh that all stages share, without partial sums, from each rank to the rank of the same
number in the next stage. Invariant: the stages' operators are those of the unsplit graph, each once and under its own
plan, so results and gradients are the same. A parameter that several stages use is a source of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strategies.core.errors import StrategyError
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, fresh, modules_around, with_leaves
from strategies.core.layout import Layout
from strategies.core.plan import Plan, Recompute
from strategies.rules import rule_of, share_rules


@dataclass(frozen=True)
class Stage:
    """`graph` has the batch and then the values in `receives` (ids) as inputs, and returns what the next stage receives
    in the layouts `sends`, or the results of the unsplit graph. `holders` gives, for each trainable parameter here that
    other stages use too, all stages that do. `ordinals` numbers random operators as in the unsplit graph; `returning`
    are the outputs to which a gradient comes back."""

    number: int
    graph: OperatorGraph
    plan: Plan
    receives: tuple[str, ...]
    sends: tuple[Layout, ...]
    holders: Mapping[str, tuple[int, ...]]
    ordinals: Mapping[str, int]
    returning: tuple[Ref, ...]

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Which of the received values a gradient goes back to."""
        return tuple(source.trainable for id in self.receives if isinstance(source := self.graph.by_id[id], Source))


def cut(graph: OperatorGraph, plan: Plan, placed: Mapping[str, int], ordinals: Mapping[str, int]) -> tuple[Stage, ...]:
    """The stages of a training graph, whose operators are `placed` by id. Raises StrategyError where a stage could not
    train or a buffer is written in one stage and used in another."""
    cutting = _Cutting(graph, plan, placed, ordinals, max(placed.values()) + 1)
    cutting.check()
    return cutting.stages()


def cut_evaluation(
    graph: OperatorGraph, plan: Plan, placed: Mapping[str, int], ordinals: Mapping[str, int], count: int
) -> tuple[Stage, ...]:
    """The `count` stages of an evaluation graph. The last one returns all results, wherever they are made."""
    return _Cutting(graph, plan, placed, ordinals, count).stages()


def recompute_in(operators: Sequence[Operator], chosen: Recompute | None) -> Recompute | None:
    """What a stage with these operators recomputes. A module that is cut is recomputed in each of its
    stages."""
    if chosen is None:
        return None
    paths = {path for operator in operators for path in modules_around(operator.path)}
    names = {operator.name for operator in operators}
    modules = tuple(path for path in chosen.modules if path in paths)
    kept = tuple(name for name in chosen.kept if name in names)
    return replace(chosen, modules=modules, kept=kept) if modules else None


class _Cutting:
    def __init__(
        self, graph: OperatorGraph, plan: Plan, placed: Mapping[str, int], ordinals: Mapping[str, int], count: int
    ) -> None:
        self.graph, self.plan, self.placed, self.ordinals, self.count = graph, plan, placed, ordinals, count
        users = graph.users
        self.used = {ref: {placed[operator.id] for operator, _ in users[ref]} for ref in graph.specs}
        for _, ref in graph.updates:
            self.used[ref].add(self._writes(ref))
        for ref in graph.outputs:
            self.used[ref].add(count - 1)
        self.crossing = [
            ref
            for operator in graph.operators
            for ref in (Ref(operator.id, index) for index in range(len(operator.results)))
            if max(self.used[ref], default=0) > placed[operator.id]
        ]
        self.layouts = {ref: self._layout(ref) for ref in self.crossing}
        users_of_gradients = (operator for operator in graph.operators if operator.id in graph.returning)
        self.returning = graph.returning
        self.gradients = graph.trained & {*graph.outputs, *(ref for one in users_of_gradients for ref in one.operands)}
        taken = set(graph.by_id)
        self.inputs: dict[Ref, Source] = {}
        for ref in self.crossing:
            operator = graph.by_id[ref.id]
            id = f"{ref.id}_{ref.index}_received" if ref.index else f"{ref.id}_received"
            id = fresh(id, taken)
            taken.add(id)
            self.inputs[ref] = Source(
                id, "input", f"{operator.name}[{ref.index}]", graph.specs[ref], ref in self.gradients
            )

    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._stage(number) for number in range(self.count))

    def check(self) -> None:
        (loss,) = self.graph.outputs
        if self.placed.get(loss.id) != self.count - 1:
            raise StrategyError(
                "MW430", "parallel.pipeline.cuts: the loss must come from the last stage; no cut may follow it."
            )
        self._check_buffers()
        self._check_shared()
        for number in range(self.count):
            if not any(number in self._stages_of(source) for source in self.graph.sources if source.trainable):
                raise StrategyError(
                    "MW430",
                    f"parallel.pipeline: stage {number} of {self.count} has no trainable parameter; cut elsewhere with "
                    "parallel.pipeline.cuts, or take fewer stages.",
                )

    def _stage(self, number: int) -> Stage:
        received = [ref for ref in self.crossing if self.placed[ref.id] < number <= max(self.used[ref])]
        sent = [ref for ref in self.crossing if self.placed[ref.id] <= number < max(self.used[ref])]
        renamed = {ref: Ref(self.inputs[ref].id) for ref in received}

        def there(leaf: Any) -> Any:
            return renamed.get(leaf, leaf) if isinstance(leaf, Ref) else leaf

        operators = tuple(
            with_leaves(operator, there) if not renamed.keys().isdisjoint(operator.operands) else operator
            for operator in self.graph.operators
            if self.placed[operator.id] == number
        )
        batch = self.graph.of_kind("input")
        others = [s for s in self.graph.sources if s.kind != "input" and number in self._stages_of(s)]
        sources = (*batch, *(self.inputs[ref] for ref in received), *others)
        last = number == self.count - 1
        leaving = self.graph.outputs if last else tuple(sent)
        outputs = tuple(there(ref) for ref in leaving)
        updates = tuple((id, there(ref)) for id, ref in self.graph.updates if self._writes(ref) == number)
        plan = Plan(
            self.plan.mesh,
            {operator.name: self.plan.operators[operator.name] for operator in operators},
            {**self.plan.inputs, **{self.inputs[ref].name: self.layouts[ref] for ref in received}},
            {source.name: self.plan.tensors[source.name] for source in others},
            self.plan.search,
            recompute_in(operators, self.plan.recompute),
        )
        graph = OperatorGraph(sources, operators, outputs, self.graph.parameter_order, updates)
        share_rules(graph, self.graph)
        return Stage(
            number,
            graph,
            plan,
            tuple(self.inputs[ref].id for ref in received),
            () if last else tuple(self.layouts[ref] for ref in sent),
            {s.name: holders for s in others if self._learns(s) and len(holders := self._stages_of(s)) > 1},
            {operator.id: self.ordinals[operator.id] for operator in operators if operator.id in self.ordinals},
            tuple(there(ref) for ref in leaving if ref in self.gradients),
        )

    def _learns(self, source: Source) -> bool:
        users = self.graph.users[Ref(source.id)]
        return source.trainable and any(operator.id in self.returning for operator, _ in users)

    def _writes(self, ref: Ref) -> int:
        """The stage that computes the new value of a buffer."""
        return self.placed.get(ref.id, 0)

    def _stages_of(self, source: Source) -> tuple[int, ...]:
        """The stages that hold a parameter, buffer or constant; what nothing uses is in the first."""
        written = {self._writes(ref) for id, ref in self.graph.updates if id == source.id}
        return tuple(sorted(self.used[Ref(source.id)] | written)) or (0,)

    def _check_buffers(self) -> None:
        for id, _ in self.graph.updates:
            source = self.graph.by_id[id]
            assert isinstance(source, Source)
            if len(holders := self._stages_of(source)) > 1:
                raise StrategyError(
                    "MW430",
                    f"parallel.pipeline: buffer {source.name} is written in the step and used by stages "
                    f"{', '.join(map(str, holders))}; put all modules that use it into one stage with "
                    "parallel.pipeline.cuts.",
                )

    def _check_shared(self) -> None:
        for source in self.graph.sources:
            users = self.graph.users[Ref(source.id)]
            learns = {self.placed[operator.id] for operator, _ in users if operator.id in self.returning}
            if source.trainable and 0 < len(learns) < len(self._stages_of(source)):
                raise StrategyError(
                    "MW430",
                    f"parallel.pipeline: parameter {source.name} learns in stage {min(learns)} and is only looked at "
                    "(without a gradient) in another one; put both uses into one stage with parallel.pipeline.cuts.",
                )

    def _layout(self, ref: Ref) -> Layout:
        """The layout in which a value is sent: that of its producer or of its first later user, whichever slice is
        smaller."""
        producer, mesh, spec = self.graph.by_id[ref.id], self.plan.mesh, self.graph.specs[ref]
        assert isinstance(producer, Operator)
        own = self.plan.operators[producer.name]
        have = (own.outputs or rule_of(producer, self.graph).result_layouts(own.assignment))[ref.index]
        uses = [(o, at) for o, at in self.graph.users[ref] if self.placed[o.id] > self.placed[ref.id]]
        found = [have.whole] if not have.partial else []
        for operator, position in uses[:1]:
            assignment = self.plan.operators[operator.name].assignment
            found.insert(0, rule_of(operator, self.graph).operand_layouts(assignment)[position].whole)
        return min(found or [have.whole], key=lambda layout: math.prod(layout.local_shape(spec.shape, mesh)))
