"""Lowering: operator graph + plan -> the program of all ranks.

Between a value (layout A) and its use (layout B) stands one redistribution: forward A -> B, backward (B, partial over
the operator's other axes) -> A. A parameter's gradient may stay partial over its replica axes: that sum is left to the
optimizer parallel, and each use carries the factor that makes the sum right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategies.engine.emitter import Emitter
from strategies.engine.program import PLAIN, Instruction, Options, Program, Redistribute
from strategies.graph import Operator, OperatorGraph, Ref, Source, rewrite
from strategies.layout import Layout
from strategies.mesh import Mesh
from strategies.plan import OperatorPlan, Plan
from strategies.redistribution import Chain, chain
from strategies.rules import rule_of


def lower(
    graph: OperatorGraph,
    plan: Plan,
    options: Options = PLAIN,
    *,
    outputs: Sequence[Layout] = (),
    ordinals: Mapping[str, int] | None = None,
) -> Program:
    """The program of `graph` under `plan`. Linear in the number of operators.

    A stage of a pipeline returns its values in the layouts `outputs`, in which their gradients come back, and its
    random operators have the `ordinals` (by id) that they have in the whole model.
    """
    return _Lowering(graph, plan, options, outputs, ordinals).program()


def random_ordinals(graph: OperatorGraph, plan: Plan, options: Options = PLAIN) -> dict[str, int]:
    """The numbers of the random operators, by id."""
    lowering = _Lowering(graph, plan, options, (), None)
    lowering.program()
    return lowering.ordinals


def left_axes(have: Layout, returned: Layout, shape: tuple[int, ...], mesh: Mesh) -> frozenset[str]:
    """The replica axes of a parameter over which this use's gradient may stay a partial sum: those over which it is
    one, and those that slice the end of a dim at the use (there the gradient is filled up with zeros; slices that
    are padded themselves only all at once)."""
    replica = set(have.replica_axes(mesh))
    left = set(returned.partial) & replica
    for size, dim in zip(shape, returned.dims, strict=True):
        if size % mesh.product(dim) and not set(dim) <= replica:
            continue
        for axis in reversed(dim):
            if axis not in replica:
                break
            left.add(axis)
    return frozenset(left)


class _Lowering:
    """What is known of the values while the program grows, operator by operator."""

    def __init__(
        self,
        graph: OperatorGraph,
        plan: Plan,
        options: Options,
        outputs: Sequence[Layout],
        ordinals: Mapping[str, int] | None,
    ) -> None:
        self.graph, self.plan, self.mesh, self.options = graph, plan, plan.mesh, options
        self.shardings = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        self.instructions: list[Instruction] = []
        self.layouts: dict[Ref, Layout] = {}  # of every global value, as it is handed on
        self.local: dict[Ref, Ref] = {}  # global value -> its slice in the program
        self.gradient: dict[Ref, bool] = {}
        self.returning = graph.returning
        self.shared: dict[tuple[Ref, Layout, Layout | None], Ref] = {}
        self.names: set[str] = set()
        self.asked, self.given = outputs, ordinals
        self.ordinals: dict[str, int] = {}
        for source in graph.sources:
            ref = Ref(source.id)
            self.layouts[ref] = plan.inputs[source.name] if source.kind == "input" else plan.tensors[source.name]
            self.local[ref], self.gradient[ref] = ref, source.trainable
            self.names.add(source.id)

    def program(self) -> Program:
        self.reductions = self._reductions()
        for operator in self.graph.operators:
            self._operator(operator)
        loss_axes: tuple[str, ...] = ()
        if self.asked:
            pairs = zip(self.graph.outputs, self.asked, strict=True)
            outputs: tuple[Ref, ...] = tuple(self._output(ref, layout) for ref, layout in pairs)
        elif self.options.partial_loss:
            (loss,) = self.graph.outputs
            loss_axes = self.mesh.sorted(self.layouts[loss].partial)
            outputs = (self.local[loss],)
        else:
            outputs = tuple(
                self._output(ref, Layout.replicated(len(self.graph.specs[ref].shape))) for ref in self.graph.outputs
            )
        updates = tuple((buffer, self._update(buffer, ref)) for buffer, ref in self.graph.updates)
        layouts = {source.id: self.layouts[Ref(source.id)] for source in self.graph.sources}
        return Program(
            self.mesh,
            self.graph.sources,
            layouts,
            tuple(self.instructions),
            outputs,
            self.reductions,
            self.graph.parameter_order,
            bool(self.ordinals),
            loss_axes,
            updates,
            self.plan.recompute,
            self._replicas(),
        )

    def _replicas(self) -> dict[Ref, tuple[str, ...]]:
        """Over which axes ranks hold the same of a value, where the plan slices what recomputed modules store."""
        if self.plan.recompute is None or not self.plan.recompute.slices_inputs:
            return {}
        found = {self.local[ref]: layout for ref, layout in self.layouts.items()}
        found |= {self.shared[key]: key[1] for key in self.shared}
        axes = {
            ref: [a for a in layout.replica_axes(self.mesh) if a not in layout.partial] for ref, layout in found.items()
        }
        return {ref: self.mesh.sorted(names) for ref, names in axes.items() if names}

    def _planned(self, operator: Operator) -> OperatorPlan:
        return self.plan.operators[operator.name]

    def _operator(self, operator: Operator) -> None:
        planned, sharding = self._planned(operator), self.shardings[operator.id]
        wanted = sharding.operand_layouts(planned.assignment)
        returned = sharding.gradient_layouts(planned.assignment)
        slices = iter([self._edge(operator, i, ref, wanted[i], returned[i]) for i, ref in enumerate(operator.operands)])
        place = lambda leaf: next(slices) if isinstance(leaf, Ref) else leaf  # noqa: E731
        args = rewrite(operator.args, place)
        kwargs = {name: rewrite(value, place) for name, value in operator.kwargs}
        emitter = Emitter(self, operator, sharding, planned, args, kwargs)
        if sharding.local is not None:
            result = sharding.local(operator, emitter)
        else:
            result = emitter.call(operator.target, *args, **kwargs)
        if isinstance(result, Ref):
            result = tuple(Ref(result.id, index) for index in range(len(operator.results)))
        natural = sharding.result_layouts(planned.assignment)
        trains = any(self.gradient[ref] for ref in operator.operands) and operator.op != "detach"
        for index, spec in enumerate(operator.results):
            ref = Ref(operator.id, index)
            self.gradient[ref] = trains and spec.floating
            self.local[ref] = result[index]
            self.layouts[ref] = natural[index]
            if planned.outputs is not None and planned.outputs[index] != natural[index]:
                after = planned.outputs[index]
                gradient = self.gradient[ref] and operator.id in self.returning
                back = chain(after.whole, natural[index].whole, spec.shape, self.mesh) if gradient else ()
                self.local[ref] = self._redistribute(operator, -1, ref, after, back, f"{operator.id}_out", gradient)
                self.layouts[ref] = after

    def _edge(self, operator: Operator, position: int, ref: Ref, wanted: Layout, returned: Layout) -> Ref:
        """The slice of `ref` that operand `position` needs."""
        source = self.graph.by_id[ref.id]
        gradient = self.gradient[ref] and operator.id in self.returning
        have, spec = self.layouts[ref], self.graph.specs[ref]
        name = f"{ref.id}_for_{operator.id}"
        if isinstance(source, Source) and source.kind == "parameter":
            if not gradient:
                return self._shared(operator, position, ref, wanted, None, (), name)
            left = left_axes(have, returned, spec.shape, self.mesh)
            back = chain(returned, Layout(have.dims, left), spec.shape, self.mesh)
            scale = self._scale(source.name, have, left)
            return self._redistribute(operator, position, ref, wanted, back, name, True, scale)
        if not gradient:
            return self._shared(operator, position, ref, wanted, None, (), name)
        back = chain(returned, have.whole, spec.shape, self.mesh)
        return self._shared(operator, position, ref, wanted, returned, back, name)

    def _shared(
        self,
        operator: Operator,
        position: int,
        ref: Ref,
        wanted: Layout,
        returned: Layout | None,
        back: Chain,
        name: str,
    ) -> Ref:
        """One redistribution for all uses that need the same slice and return the same kind of gradient."""
        key = (ref, wanted, returned)
        if key not in self.shared:
            self.shared[key] = self._redistribute(operator, position, ref, wanted, back, name, returned is not None)
        return self.shared[key]

    def _redistribute(
        self,
        operator: Operator,
        position: int,
        ref: Ref,
        wanted: Layout,
        back: Chain,
        name: str,
        gradient: bool,
        scale: float = 1.0,
    ) -> Ref:
        spec = self.graph.specs[ref]
        forward = chain(self.layouts[ref], wanted, spec.shape, self.mesh)
        if not forward and not back and scale == 1.0:
            return self.local[ref]
        fresh = self.fresh(name)
        self.instructions.append(
            Redistribute(
                fresh, self.local[ref], forward, back, scale, gradient, spec, operator.name, position, operator.path
            )
        )
        return Ref(fresh)

    def _reductions(self) -> dict[str, tuple[str, ...]]:
        """Per trainable parameter: the union over its uses of the axes that are left (all replica axes for a
        sharded optimizer)."""
        found = {}
        for source in self.graph.of_kind("parameter"):
            if not source.trainable:
                continue
            have = self.layouts[Ref(source.id)]
            if self.options.sharded_optimizer:
                found[source.name] = have.replica_axes(self.mesh)
                continue
            left: set[str] = set()
            for operator, position in self.graph.users[Ref(source.id)]:
                if operator.id not in self.returning:
                    continue
                returned = self.shardings[operator.id].gradient_layouts(self._planned(operator).assignment)[position]
                left |= left_axes(have, returned, source.spec.shape, self.mesh)
            found[source.name] = self.mesh.sorted(left)
        return found

    def _scale(self, name: str, have: Layout, left: frozenset[str]) -> float:
        """What makes the later sum right: axes over which this use's gradient is already complete are counted once, and
        a sharded optimizer's division by the world size is undone."""
        complete = self.mesh.product(axis for axis in self.reductions[name] if axis not in left)
        return self.mesh.size / complete if self.options.sharded_optimizer else 1 / complete

    def _output(self, ref: Ref, wanted: Layout) -> Ref:
        spec, have = self.graph.specs[ref], self.layouts[ref]
        forward = chain(have, wanted, spec.shape, self.mesh)
        back = chain(wanted, have.whole, spec.shape, self.mesh) if self.gradient[ref] else ()
        if not forward and not back:
            return self.local[ref]
        producer = self.graph.by_id[ref.id]
        fresh = self.fresh(f"{ref.id}_output")
        self.instructions.append(
            Redistribute(fresh, self.local[ref], forward, back, 1.0, self.gradient[ref], spec, producer.name, -1, ())
        )
        return Ref(fresh)

    def _update(self, buffer: str, ref: Ref) -> Ref:
        """The slice of a buffer's new value, laid out like the buffer. No gradient comes back through it."""
        spec = self.graph.specs[ref]
        forward = chain(self.layouts[ref], self.layouts[Ref(buffer)], spec.shape, self.mesh)
        if not forward:
            return self.local[ref]
        fresh = self.fresh(f"{buffer}_update")
        producer = self.graph.by_id[ref.id]
        self.instructions.append(
            Redistribute(fresh, self.local[ref], forward, (), 1.0, False, spec, producer.name, -1, ())
        )
        return Ref(fresh)

    def ordinal(self, operator: Operator) -> int:
        """The number of a random operator, the same whenever it is asked for."""
        return self.ordinals.setdefault(
            operator.id, len(self.ordinals) if self.given is None else self.given[operator.id]
        )

    def fresh(self, name: str) -> str:
        """A name that no value of the program has yet."""
        candidate, number = name, 1
        while candidate in self.names:
            candidate, number = f"{name}_{number}", number + 1
        self.names.add(candidate)
        return candidate
