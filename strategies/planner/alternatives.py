"""The alternatives of an operator: every legal strategy, with its cost while its neighbours keep theirs.

The operator, the users of its results and the other users of its operands are lowered in isolation, so a cost covers
exactly the collectives that the engine would execute. Invariant: the cost of the planned strategy is that of the
operator and the redistributions of its operands and results in the complete plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

from strategies.core.graph import CONSTANT_TO_AUTOGRAD, Operator, OperatorGraph, Ref, Source, with_refs
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions, Program, Redistribute
from strategies.core.steps import ALL_REDUCE
from strategies.cost.by_operator import GRADIENTS, marginal_seconds
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import path_seconds
from strategies.cost.roofline import operator_seconds
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.rules.sharding import Assignment, Sharding

MOST = 4096
"""Legal strategies beyond which only those are priced that slice by runs of neighbouring axes."""


@dataclass(frozen=True)
class Alternative:
    """A strategy and its price: seconds of a step, and the redistributions that it needs around the operator; bytes of
    the operator's parameters and results on one rank."""

    assignment: Assignment
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    compute: float
    communication: float
    gradients: float
    parameters: int
    stored: int
    redistributions: tuple[Redistribute, ...]

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.gradients


@dataclass(frozen=True)
class Neighbourhood:
    """An operator of a planned graph with what its price depends on. `zero_stage` and `accumulate` (micro-batches of a
    step) are those of the run."""

    graph: OperatorGraph
    plan: Plan
    operator: Operator
    cluster: Cluster
    zero_stage: int = 0
    accumulate: int = 1

    @cached_property
    def planned(self) -> Alternative:
        """The strategy that the plan chose."""
        return self.price(self.plan.operators[self.operator.name].assignment)

    def others(self) -> list[Alternative]:
        """Every other legal strategy, cheapest first."""
        chosen = self.plan.operators[self.operator.name].assignment
        priced = [
            self.price(assignment)
            for assignment in legal_assignments(self._sharding, self.plan.mesh)
            if not _same(assignment, chosen)
        ]
        return sorted(priced, key=lambda other: other.seconds)

    def price(self, assignment: Assignment) -> Alternative:
        """The operator with another strategy, all others unchanged; a parameter in the layout that this operator needs
        follows."""
        mesh, cluster, sharding = self.plan.mesh, self.cluster, self._sharding
        plan = self._changed(assignment)
        program = lower(
            self._part, plan, LoweringOptions(sharded_optimizer=self.zero_stage > 0), outputs=self._outputs(plan)
        )
        around = tuple(self._around(program))
        sent = sum(
            path_seconds(chain, one.spec.item_bytes, mesh, cluster)
            for one in around
            for chain in ((one.forward, one.backward) if one.differentiable else (one.forward,))
        )
        compute = operator_seconds(sharding, assignment, self.operator, self.graph, mesh, cluster, True)
        parameters = [s for s in self._sources if s.kind == "parameter"]
        results = plan.operators[self.operator.name].outputs or sharding.result_layouts(assignment)
        return Alternative(
            assignment,
            sharding.operand_layouts(assignment),
            results,
            self.accumulate * compute,
            self.accumulate * sent,
            sum(self._gradient(source, plan, program) for source in parameters),
            sum(plan.local_bytes(source) for source in parameters),
            sum(
                layout.local_elements(spec.shape, mesh) * spec.item_bytes
                for spec, layout in zip(self.operator.results, results, strict=True)
            ),
            around,
        )

    @cached_property
    def _sharding(self) -> Sharding:
        return rule_of(self.operator, self.graph)

    @cached_property
    def _sources(self) -> tuple[Source, ...]:
        """The sources that are operands of the operator, each once."""
        nodes = {ref.id: self.graph.by_id[ref.id] for ref in self.operator.operands}
        return tuple(node for node in nodes.values() if isinstance(node, Source))

    @cached_property
    def _values(self) -> frozenset[Ref]:
        """The operator's operands and results."""
        results = (Ref(self.operator.id, index) for index in range(len(self.operator.results)))
        return frozenset((*self.operator.operands, *results))

    @cached_property
    def _part(self) -> OperatorGraph:
        """The graph of the operator and all users of its operands and results; what comes from elsewhere is an
        input."""
        near = {self.operator.id} | {user.id for ref in self._values for user, _ in self.graph.users[ref]}
        operators = [operator for operator in self.graph.operators if operator.id in near]
        inputs: dict[Ref, Source] = {}
        sources: dict[str, Source] = {}
        for ref in (ref for operator in operators for ref in operator.operands):
            node = self.graph.by_id[ref.id]
            if isinstance(node, Source):
                sources[node.id] = node
            elif ref.id not in near:
                name = f"{ref.id}[{ref.index}]"
                inputs[ref] = Source(name, "input", name, self.graph.specs[ref], ref in self.graph.trained)

        def there(ref: Ref) -> Ref:
            return Ref(inputs[ref].id) if ref in inputs else ref

        return OperatorGraph(
            (*sources.values(), *inputs.values()),
            tuple(with_refs(o, there) for o in operators),
            tuple(
                ref
                for operator in operators
                for index, spec in enumerate(operator.results)
                if spec.floating and (ref := Ref(operator.id, index)) in self._needed
            ),
            self.graph.parameter_order,
        )

    @cached_property
    def _needed(self) -> frozenset[Ref]:
        """The values on which the graph's outputs depend."""
        wanted = set(self.graph.outputs)
        for operator in reversed(self.graph.operators):
            if operator.op not in CONSTANT_TO_AUTOGRAD and any(
                Ref(operator.id, i) in wanted for i in range(len(operator.results))
            ):
                wanted.update(operator.operands)
        return frozenset(wanted)

    def _changed(self, assignment: Assignment) -> Plan:
        """The plan of the part with another assignment of the operator."""
        mine = self.plan.operators[self.operator.name]
        same = _same(assignment, mine.assignment)
        operators = {o.name: self.plan.operators[o.name] for o in self._part.operators}
        if not same:
            operators[self.operator.name] = OperatorPlan(assignment, mine.origin, mine.outputs)
        tensors = dict(self.plan.tensors)
        before, after = (self._sharding.operand_layouts(a) for a in (mine.assignment, assignment))
        for position, ref in enumerate(self.operator.operands):
            node = self.graph.by_id[ref.id]
            first, _ = self.graph.users[ref][0]
            if isinstance(node, Source) and node.kind == "parameter" and first.id == self.operator.id:
                if tensors[node.name] == before[position]:
                    tensors[node.name] = after[position]
        inputs = {}
        for source in self._part.of_kind("input"):
            inputs[source.name] = self.plan.inputs.get(source.name) or self._handed_on(source)
        return Plan(self.plan.mesh, operators, inputs, tensors)

    def _handed_on(self, received: Source) -> Layout:
        """The layout of a value from outside of the part."""
        id, _, index = received.id.rpartition("[")
        producer = self.graph.by_id[id]
        assert isinstance(producer, Operator)
        planned = self.plan.operators[producer.name]
        layouts = planned.outputs or rule_of(producer, self.graph).result_layouts(planned.assignment)
        return layouts[int(index[:-1])]

    def _outputs(self, plan: Plan) -> tuple[Layout, ...]:
        """The outputs of the part, as they come."""
        outputs = []
        for ref in self._part.outputs:
            operator = self._part.by_id[ref.id]
            assert isinstance(operator, Operator)
            planned = plan.operators[operator.name]
            layouts = planned.outputs or rule_of(operator, self._part).result_layouts(planned.assignment)
            outputs.append(layouts[ref.index])
        return tuple(outputs)

    def _around(self, program: Program) -> Iterator[Redistribute]:
        """The redistributions of the operator's operands and results, and those inside of it."""
        for one in program.redistributions:
            if Ref(one.id) in program.outputs and not one.forward:  # a part has outputs that the complete graph has not
                continue
            operator = self.graph.by_name[one.operator]
            if operator.id == self.operator.id or (one.operand >= 0 and operator.operands[one.operand] in self._values):
                yield one

    def _gradient(self, source: Source, plan: Plan, program: Program) -> float:
        """Seconds that the gradient of a parameter adds to a bucket of gradients, as far as backward does not hide
        them."""
        layout, mesh = plan.tensors[source.name], plan.mesh
        axes = layout.replica_axes(mesh) if self.zero_stage else program.reductions.get(source.name, ())
        ranks = mesh.product(axes)
        if ranks == 1 or not source.trainable:
            return 0.0
        size, total = plan.local_bytes(source), 0.0
        for kind in GRADIENTS[self.zero_stage]:
            sent = (2 if kind == ALL_REDUCE else 1) * size * (ranks - 1) / ranks
            total += marginal_seconds(kind, sent, axes, mesh, self.cluster)
        return (1 - self.cluster.overlap) * total


def legal_assignments(sharding: Sharding, mesh: Mesh) -> Iterator[Assignment]:
    """Every legal way to slice an operator's factors, each dim by axes in mesh order."""
    axes = [name for name, size in mesh.axes if size > 1]
    options: tuple[str | None, ...] = (*sharding.sizes, None)
    for placement in product(options, repeat=len(axes)):
        if len(options) ** len(axes) > MOST and not _runs(placement):
            continue
        assignment: dict[str, tuple[str, ...]] = {}
        for axis, factor in zip(axes, placement, strict=True):
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        if sharding.legal(assignment, mesh):
            yield {factor: assignment[factor] for factor in sharding.factors if factor in assignment}


def _runs(placement: tuple[str | None, ...]) -> bool:
    """Whether every factor has neighbouring axes only."""
    changes = sum(a != b for a, b in pairwise(placement))
    return changes + 1 == len(set(placement))


def _same(one: Assignment, other: Assignment) -> bool:
    return {k: v for k, v in one.items() if v} == {k: v for k, v in other.items() if v}
