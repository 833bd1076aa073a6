"""Lowering: operator graph + plan -> the program of all ranks.

Between a value (layout A) and its use (layout B) stands one redistribution: forward A -> B, backward (B, partial over
the operator's other axes) -> A. A parameter's gradient may stay partial over its replica axes: that sum is left to the
optimizer parallel, and each use carries the factor that makes the sum right. Ranks add up results of less than 32 bits
in fp32: an operator whose contraction is sliced computes in fp32, and its result is rounded when it is complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from strategies.core.graph import Operator, OperatorGraph, Ref, Source, rewrite, wide
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import DEFAULT_OPTIONS, Compute, Instruction, LoweringOptions, Program, Redistribute
from strategies.core.steps import ReshardingPath
from strategies.lowering.emitter import Emitter
from strategies.resharding.path import resharding_path
from strategies.rules import rule_of
from strategies.rules.random import draws
from strategies.rules.traits import traits


def lower(
    graph: OperatorGraph,
    plan: Plan,
    options: LoweringOptions = DEFAULT_OPTIONS,
    *,
    outputs: Sequence[Layout] = (),
    ordinals: Mapping[str, int] | None = None,
    open_axes: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> Program:
    """Lower a graph to the program that all ranks run. Linear in the number of operators.

    Args:
        graph: the operator graph.
        plan: the plan of this graph.
        options: how to lower.
        outputs: for a stage of a pipeline, the layouts in which it returns its values and receives their gradients.
        ordinals: for a stage of a pipeline, the numbers of random operators in the unsplit model, by operator id.
        open_axes: axes over which a parameter's gradient, by name, is at least reduced after backward, because other
            stages of the same ranks add to it.
    """
    return _Lowering(graph, plan, options, outputs, ordinals, open_axes).program()


_ordinals: dict[int, dict[LoweringOptions, dict[str, int]]] = {}
"""By graph, as long as it lives."""


def random_ordinals(graph: OperatorGraph, plan: Plan, options: LoweringOptions = DEFAULT_OPTIONS) -> dict[str, int]:
    """The numbers of the random operators, by id. They are the same for every plan, so they are computed once."""
    if id(graph) not in _ordinals:
        _ordinals[id(graph)] = {}
        weakref.finalize(graph, _ordinals.pop, id(graph), None)
    by_options = _ordinals[id(graph)]
    if options not in by_options and not any(draws(operator) for operator in graph.operators):
        by_options[options] = {}
    if options not in by_options:
        lowering = _Lowering(graph, plan, options, (), None, {})
        lowering.program()
        by_options[options] = lowering.ordinals
    return by_options[options]


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
    """The layouts and gradients of the values emitted so far, while the program grows operator by operator."""

    def __init__(
        self,
        graph: OperatorGraph,
        plan: Plan,
        options: LoweringOptions,
        outputs: Sequence[Layout],
        ordinals: Mapping[str, int] | None,
        open_axes: Mapping[str, Iterable[str]],
    ) -> None:
        self.graph, self.plan, self.mesh, self.options = graph, plan, plan.mesh, options
        self.shardings = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        self.instructions: list[Instruction] = []
        self.layouts: dict[Ref, Layout] = {}  # of every global value, as its users receive it
        self.local: dict[Ref, Ref] = {}  # global value -> its slice in the program
        self.gradient: dict[Ref, bool] = {}
        self.returning = graph.returning
        self.shared: dict[tuple[Ref, Layout, Layout | None], Ref] = {}
        self.uses: dict[tuple[Ref, str, int], Ref] = {}  # (parameter, operator, position) -> its slice there
        self.added_wide: set[Ref] = set()  # partial sums that the ranks hold in fp32
        self.names: set[str] = set()
        self.output_layouts, self.given, self.open_axes = outputs, ordinals, open_axes
        self.ordinals: dict[str, int] = {}
        self.random_numbers: dict[str, int] = {}
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
        if self.output_layouts:
            pairs = zip(self.graph.outputs, self.output_layouts, strict=True)
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
            {
                o.name: (o.batch_slice.name, o.batch_slice.index)
                for o in self.graph.operators
                if o.batch_slice is not None
            },
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
        edges = [self._edge(operator, i, ref, wanted[i], returned[i]) for i, ref in enumerate(operator.operands)]
        natural = sharding.result_layouts(planned.assignment)
        wider = self._computes_wide(operator, natural)
        if wider:
            dtypes = [self.graph.specs[ref].dtype for ref in operator.operands]
            edges = [
                local if wide(dtype) == dtype else self._cast(operator, local, wide(dtype))
                for local, dtype in zip(edges, dtypes, strict=True)
            ]
        slices = iter(edges)
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
        trains = any(self.gradient[ref] for ref in operator.operands) and operator.op != "detach"
        for index, spec in enumerate(operator.results):
            ref = Ref(operator.id, index)
            self.gradient[ref] = trains and spec.floating
            self.local[ref] = result[index]
            self.layouts[ref] = natural[index]
            if wider:
                self.added_wide.add(ref)
            if planned.outputs is not None and planned.outputs[index] != natural[index]:
                after = planned.outputs[index]
                gradient = self.gradient[ref] and operator.id in self.returning
                back = resharding_path(after.whole, natural[index].whole, spec.shape, self.mesh) if gradient else ()
                self.local[ref] = self._redistribute(operator, -1, ref, after, back, f"{operator.id}_out", gradient)
                self.layouts[ref] = after
                self.added_wide.discard(ref)

    def _computes_wide(self, operator: Operator, natural: Sequence[Layout]) -> bool:
        """Whether an operator computes in fp32 because ranks add up its results."""
        return (
            self.options.wide_sums
            and traits(operator.op).sums
            and any(self.mesh.product(layout.partial) > 1 for layout in natural)
            and all(wide(spec.dtype) != spec.dtype for spec in operator.results)
            and not any(isinstance(value, torch.dtype) for value in (*operator.args, *operator.keywords.values()))
        )

    def _cast(self, operator: Operator, value: Ref, dtype: str) -> Ref:
        """A slice of a value in another dtype."""
        fresh, target = self.fresh(f"{value.id}_as_{dtype}"), "aten.to.dtype"
        call = Compute(fresh, target, (value, getattr(torch, dtype)), (), operator.name, operator.path)
        self.instructions.append(call)
        return Ref(fresh)

    def _carried(self, step: Redistribute, ref: Ref, operator: Operator) -> Ref:
        """The slice of `ref` that `step` makes; what ranks add up in fp32 is rounded after it."""
        if ref not in self.added_wide:
            self.instructions.append(step)
            return Ref(step.id)
        self.instructions.append(replace(step, spec=replace(step.spec, dtype=wide(step.spec.dtype))))
        return self._cast(operator, Ref(step.id), step.spec.dtype)

    def _edge(self, operator: Operator, position: int, ref: Ref, wanted: Layout, returned: Layout) -> Ref:
        """The slice of `ref` that operand `position` needs."""
        source = self.graph.by_id[ref.id]
        gradient = self.gradient[ref] and operator.id in self.returning
        have, spec = self.layouts[ref], self.graph.specs[ref]
        name = f"{ref.id}_for_{operator.id}"
        if isinstance(source, Source) and source.kind == "parameter":
            if not gradient:
                return self._shared(operator, position, ref, wanted, None, (), name)
            use = (ref, operator.id if operator.batch_slice is None else operator.batch_slice.of, position)
            if use not in self.uses:  # all copies of the batch share one
                left = left_axes(have, returned, spec.shape, self.mesh)
                back = resharding_path(returned, Layout(have.dims, left), spec.shape, self.mesh)
                scale = self._scale(source.name, have, left)
                self.uses[use] = self._redistribute(operator, position, ref, wanted, back, name, True, scale)
            return self.uses[use]
        if not gradient:
            return self._shared(operator, position, ref, wanted, None, (), name)
        back = resharding_path(returned, have.whole, spec.shape, self.mesh)
        return self._shared(operator, position, ref, wanted, returned, back, name)

    def _shared(
        self,
        operator: Operator,
        position: int,
        ref: Ref,
        wanted: Layout,
        returned: Layout | None,
        back: ReshardingPath,
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
        back: ReshardingPath,
        name: str,
        gradient: bool,
        scale: float = 1.0,
    ) -> Ref:
        spec = self.graph.specs[ref]
        forward = resharding_path(self.layouts[ref], wanted, spec.shape, self.mesh)
        if not forward and not back and scale == 1.0:
            return self.local[ref]
        step = Redistribute(
            self.fresh(name), self.local[ref], forward, back, scale, gradient, spec, operator.name, position,
            operator.path,
        )  # fmt: skip
        return self._carried(step, ref, operator)

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
            left = set(self.open_axes.get(source.name, ()))
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
        forward = resharding_path(have, wanted, spec.shape, self.mesh)
        back = resharding_path(wanted, have.whole, spec.shape, self.mesh) if self.gradient[ref] else ()
        if not forward and not back:
            return self.local[ref]
        return self._handed_on(ref, forward, back, f"{ref.id}_output", self.gradient[ref])

    def _update(self, buffer: str, ref: Ref) -> Ref:
        """The slice of a buffer's new value, laid out like the buffer. No gradient comes back through it."""
        spec = self.graph.specs[ref]
        forward = resharding_path(self.layouts[ref], self.layouts[Ref(buffer)], spec.shape, self.mesh)
        if not forward:
            return self.local[ref]
        return self._handed_on(ref, forward, (), f"{buffer}_update", False)

    def _handed_on(self, ref: Ref, forward: ReshardingPath, back: ReshardingPath, name: str, gradient: bool) -> Ref:
        """The slice of a value that leaves the program."""
        producer, spec = self.graph.by_id[ref.id], self.graph.specs[ref]
        step = Redistribute(
            self.fresh(name), self.local[ref], forward, back, 1.0, gradient, spec, producer.name, -1, ()
        )
        if ref not in self.added_wide:
            self.instructions.append(step)
            return Ref(step.id)
        assert isinstance(producer, Operator)
        return self._carried(step, ref, replace(producer, path=()))

    def ordinal(self, operator: Operator) -> int:
        """The number of a random operator, the same for every call; exact copies of one share it."""
        if operator.id not in self.ordinals:
            random_numbers = (
                operator.batch_slice.of if operator.batch_slice is not None and self.options.exact else operator.id
            )
            number = self.random_numbers.setdefault(random_numbers, len(self.random_numbers))
            self.ordinals[operator.id] = number if self.given is None else self.given[operator.id]
        return self.ordinals[operator.id]

    def fresh(self, name: str) -> str:
        """A name that no value of the program has yet."""
        candidate, number = name, 1
        while candidate in self.names:
            candidate, number = f"{name}_{number}", number + 1
        self.names.add(candidate)
        return candidate
