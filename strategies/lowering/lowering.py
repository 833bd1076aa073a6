"""Lowering: operator graph + plan -> the program of all ranks.

Between a value (layout A) and its use (layout B) stands one redistribution: forward A -> B, backward (B, partial over
the operator's other axes) -> A, still partial over the axes that A defers. A parameter's gradient may stay partial over
its replica axes: that sum is left to the optimizer parallel, and each use carries the factor that makes the sum right.
Ranks add up results of less than 32 bits in fp32: an operator whose contraction is sliced computes in fp32, and its
result is rounded when it is complete.

What a rule's local program calls on its `Emitter` becomes instructions of the program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from strategies.core.errors import StrategyError
from strategies.core.graph import (
    CONSTANT_TO_AUTOGRAD,
    FusedSections,
    Operator,
    OperatorGraph,
    Ref,
    Source,
    TensorSpec,
    refs,
    rewrite,
    wide,
)
from strategies.core.layout import Layout, Stripes, WindowLayout, stored
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import (
    DEFAULT_OPTIONS,
    KEY,
    Compute,
    Cooperate,
    Fused,
    Instruction,
    LoweringOptions,
    Ordinal,
    Program,
    RankValue,
    Redistribute,
)
from strategies.core.steps import ALL_REDUCE, EXCHANGE, LOCAL, SLICE, ReshardingPath, Step
from strategies.resharding.path import resharding_path
from strategies.rules import rule_of
from strategies.rules.registry import changed, named
from strategies.rules.sharding import Assignment, Dims, Sharding
from strategies.rules.traits import traits

NOTHING: Mapping[str, Any] = MappingProxyType({})
Pair = tuple[Layout, Layout]


def lower(
    graph: OperatorGraph,
    plan: Plan,
    options: LoweringOptions = DEFAULT_OPTIONS,
    *,
    outputs: Sequence[Layout] = (),
    ordinals: Mapping[str, int] = NOTHING,
    open_axes: Mapping[str, Iterable[str]] = NOTHING,
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

    Raises:
        StrategyError: the mesh of `plan` has a share, and ranks with others would have to exchange their slices.
    """
    program = _Lowering(graph, plan, options, outputs, ordinals, open_axes).program()
    check_share(program, graph)
    return program


def random_ordinals(graph: OperatorGraph, options: LoweringOptions = DEFAULT_OPTIONS) -> dict[str, int]:
    """The numbers of the random operators, by id. They are the same for every plan."""
    emission = Emission(graph, Mesh(()), options)
    for operator in graph.operators:
        emission.emit(operator, rule_of(operator, graph), {}, operator.args, operator.keywords)
    return emission.ordinals


def local_instructions(
    operator: Operator,
    sharding: Sharding,
    assignment: Assignment,
    graph: OperatorGraph,
    mesh: Mesh,
    options: LoweringOptions = DEFAULT_OPTIONS,
) -> list[Instruction]:
    """The local program of one operator under an assignment; empty where a slice computes the operator itself."""
    emission = Emission(graph, mesh, options)
    if sharding.local is not None:
        emission.emit(operator, sharding, assignment, operator.args, operator.keywords)
    return emission.instructions


def unequal(what: str) -> StrategyError:
    """The refusal of slices of different sizes in `what`."""
    return StrategyError(
        "MW414",
        f"The ranks have different numbers of rows of the batch, which {what} cannot be computed with: it needs values "
        "of other ranks' rows, or slices of one size. Use equal slices (parallel.batch_rows=[] and cluster.groups=[]), "
        "or a model whose rows do not depend on one another; give a function or operator of yours that works row by "
        "row a rule (`@sharding_rule`), without which it takes all rows.",
    )


def check_share(program: Program, graph: OperatorGraph) -> None:
    """Raises StrategyError where ranks with different shares would communicate slices: only sums of tensors of one
    shape pass between them."""
    share = program.mesh.share
    if share is None:
        return

    def refusal(name: str) -> StrategyError:
        return unequal(graph.by_name[name].where if name in graph.by_name else name)

    for carried in program.redistributions:
        for step in (*carried.forward, *(carried.backward if carried.differentiable else ())):
            larger = step.before if step.kind == SLICE else step.after
            alone = step.kind == ALL_REDUCE or (step.kind in LOCAL and not larger.dims[step.dim])
            if share.axis in step.axes and not alone:
                raise refusal(carried.operator)
            if step.kind == EXCHANGE and share.axis in step.before.axes | step.after.axes:
                raise refusal(carried.operator)


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


def _returned(returned: Layout, have: Layout, mesh: Mesh) -> tuple[Pair, float]:
    """The layouts between which the gradient of a value with the layout `have` is carried back from a use, and its
    factor: deferred axes are added later, so over axes where the gradient is complete already it is counted once."""
    left = have.deferred & returned.partial
    return (returned, Layout(have.dims, left)), 1 / mesh.product(have.deferred - left)


def unpacked(shape: Sequence[int], packed: FusedSections, sizes: Sequence[int]) -> tuple[int, ...]:
    """A shape with `sizes` in place of the dim in which the tensor is packed."""
    return (*shape[: packed.dim], *sizes, *shape[packed.dim + 1 :])


def _complete(layout: Layout, dim: int) -> Layout:
    """The layout with one dim replicated."""
    return Layout((*layout.dims[:dim], (), *layout.dims[dim + 1 :]), layout.partial)


def _apart(layout: Layout, packed: FusedSections) -> Layout:
    """The layout of a tensor whose sections, all of one size, have a dim of their own."""
    dims = layout.dims
    return Layout((*dims[: packed.dim], (), *dims[packed.dim :]), layout.partial)


@dataclass
class Emission:
    """The instructions that operators have emitted so far."""

    graph: OperatorGraph
    mesh: Mesh
    options: LoweringOptions = DEFAULT_OPTIONS
    instructions: list[Instruction] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    ordinals: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def emit(
        self, operator: Operator, sharding: Sharding, assignment: Assignment, args: tuple[Any, ...], kwargs: Any
    ) -> Ref | tuple[Ref, ...]:
        """The result of an operator on slices."""
        emitter = Emitter(self, operator, sharding, assignment, args, kwargs)
        if sharding.local is None:
            return emitter.call(operator.target, *args, **kwargs)
        return sharding.local(operator, emitter)

    def ordinal(self, operator: Operator) -> int:
        """The number of a random operator, the same for every call; exact batch splits of one share it."""
        if operator.id not in self.ordinals:
            split = operator.batch_slice if self.options.exact else None
            key = operator.id if split is None else split.of
            self.ordinals[operator.id] = self._numbers.setdefault(key, len(self._numbers))
        return self.ordinals[operator.id]

    def computes_wide(self, operator: Operator, natural: Sequence[Layout]) -> bool:
        """Whether an operator computes in fp32 because ranks add up its results."""
        return (
            self.options.wide_sums
            and traits(operator.op).sums
            and any(self.mesh.product(layout.partial) > 1 for layout in natural)
            and all(wide(spec.dtype) != spec.dtype for spec in operator.results)
            and not any(isinstance(value, torch.dtype) for value in (*operator.args, *operator.keywords.values()))
        )

    def fresh(self, name: str) -> str:
        """A name that no value of the program has yet."""
        candidate, number = name, 1
        while candidate in self.names:
            candidate, number = f"{name}_{number}", number + 1
        self.names.add(candidate)
        return candidate


@dataclass
class Emitter:
    """The `Local` of one operator."""

    emission: Emission
    operator: Operator
    sharding: Sharding
    assignment: Assignment
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        return named(self.operator.target, self.args, self.kwargs)

    @property
    def exact(self) -> bool:
        return self.emission.options.exact

    @property
    def key(self) -> Ref:
        return KEY

    @property
    def ordinal(self) -> int:
        return Ordinal(self.emission.ordinal(self.operator))

    @property
    def ring(self) -> bool:
        return self.emission.options.ring

    def itself(self, /, **changes: Any) -> Ref:
        target, args, kwargs = self.operator.target, self.args, self.kwargs
        if changes:
            args, kwargs = changed(target, args, kwargs, **changes)
        return self._compute(target, args, kwargs, self.operator.multiple)

    def call(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        multiple = self.operator.multiple and target in (self.operator.target, "local.seeded")
        return self._compute(target, args, kwargs, multiple)

    def several(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        return self._compute(target, args, kwargs, True)

    def _compute(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], multiple: bool) -> Ref:
        own = target == self.operator.target or target.startswith("aten")
        fresh = self.emission.fresh(self.operator.id if own else f"{self.operator.id}_{target.split('.')[1]}")
        self.emission.instructions.append(
            Compute(fresh, target, args, tuple(kwargs.items()), self.operator.name, self.operator.path, multiple)
        )
        return Ref(fresh)

    def slices(self, *factors: str) -> int:
        if not self.equal(*factors):
            raise unequal(self.operator.where)
        return self.emission.mesh.product(self._axes(factors))

    def parts(self, *factors: str) -> float:
        parts = self.emission.mesh.parts(self._axes(factors))
        return int(parts) if self.equal(*factors) else float(parts)

    def equal(self, *factors: str) -> bool:
        share = self.emission.mesh.share
        return share is None or share.axis not in self._axes(factors)

    def position(self, factors: str | Dims, stride: int | None = None) -> RankValue:
        return RankValue(self._axes((factors,) if isinstance(factors, str) else factors), stride)

    def size(self, factor: str) -> int:
        return self.sharding.sizes[factor]

    def _axes(self, factors: Sequence[str | None]) -> tuple[str, ...]:
        return tuple(axis for factor in factors if factor for axis in self.assignment.get(factor, ()))

    def sum_over(
        self,
        value: Ref,
        *factors: str,
        shape: Sequence[int] = (),
        differentiable: bool = False,
        dtype: str | None = None,
    ) -> Ref:
        after = Layout.replicated(len(shape))
        before = Layout(after.dims, frozenset(self._axes(factors)))
        return self._carried(value, f"{value.id}_sum", before, after, before, tuple(shape), dtype, differentiable)

    def gather_over(
        self,
        value: Ref,
        *factors: str,
        shape: Sequence[int] = (),
        dtype: str | None = None,
        dim: int | None = None,
        differentiable: bool | None = None,
    ) -> Ref:
        axes, name = self._axes(factors), f"{value.id}_gathered"
        if dim is None and not self.equal(*factors):  # only sums pass between ranks with different slices
            shape = (self.emission.mesh.product(axes), *shape)
            empty = self.call("aten.new_zeros.default", value, shape)
            value = self.call("aten.select_scatter.default", empty, value, 0, RankValue(axes))
            spec = TensorSpec(shape, dtype or self.operator.results[0].dtype)
            differentiable = spec.floating if differentiable is None else differentiable
            return self.sum_over(value, *factors, shape=shape, differentiable=differentiable, dtype=dtype)
        if dim is None:
            value, shape, dim = self.call("aten.unsqueeze.default", value, 0), (1, *shape), 0
        dim %= len(shape)
        after = Layout.replicated(len(shape))
        before = Layout((*after.dims[:dim], axes, *after.dims[dim + 1 :]))
        complete = (*shape[:dim], shape[dim] * self.slices(*factors), *shape[dim + 1 :])
        returned = Layout(after.dims, frozenset(axes))
        return self._carried(value, name, before, after, returned, complete, dtype, differentiable)

    def windows_over(self, value: Ref, windows: Mapping[int, tuple[str, Sequence[tuple[int, int]]]]) -> Ref:
        graph, fetched = self.emission.graph, self.operator.operands[0]
        complete, local = graph.specs[fetched].shape, self.operand_shape()
        axes = [self._axes((windows[dim][0],)) if dim in windows else () for dim in range(len(local))]
        shape = tuple(complete[dim] if dim in windows else size for dim, size in enumerate(local))
        cut = Layout(tuple(axes))
        wanted = WindowLayout(
            cut.dims, windows=tuple(tuple(windows[dim][1]) if dim in windows else () for dim in range(len(local)))
        )
        group = self.emission.mesh.sorted(cut.axes)
        there, back = Step(EXCHANGE, group, 0, 0, cut, wanted, shape), Step(EXCHANGE, group, 0, 0, wanted, cut, shape)
        natural, dtype = self.sharding.result_layouts(self.assignment), self.operator.results[0].dtype
        dtype = wide(dtype) if self.emission.computes_wide(self.operator, natural) else dtype
        differentiable = None if fetched in graph.trained else False
        return self._redistributed(value, f"{value.id}_windows", (there,), (back,), shape, dtype, differentiable)

    def channel(
        self, kind: str, factor: str, shapes: Sequence[Sequence[int]], dtype: str, forward: int, backward: int
    ) -> Fused:
        operator, value = self.operator, next(refs(self.args))
        parts = []
        for shape in map(tuple, shapes):
            own = Layout.replicated(len(shape))
            step, spec = Step(kind, self._axes((factor,)), 0, 0, own, own, shape), TensorSpec(shape, dtype)
            name = self.emission.fresh(f"{operator.id}_{kind}")
            there, back = (step,) * forward, (step,) * backward
            parts.append(Redistribute(name, value, there, back, 1.0, True, spec, operator.name, -1, operator.path))
        return Fused(self.emission.fresh(f"{operator.id}_{kind}"), tuple(parts), operator.path)

    def cooperate(self, target: str, channels: Sequence[Fused], *args: Any) -> Ref:
        operator, fresh = self.operator, self.emission.fresh(f"{self.operator.id}_{target.split('.')[1]}")
        call = Cooperate(fresh, target, args, (), operator.name, operator.path, channels=tuple(channels))
        self.emission.instructions.append(call)
        return Ref(fresh)

    def _carried(
        self,
        value: Ref,
        name: str,
        before: Layout,
        after: Layout,
        returned: Layout,
        shape: tuple[int, ...],
        dtype: str | None,
        differentiable: bool | None = None,
    ) -> Ref:
        """`value` carried from layout `before` to `after`; its gradient, if it has one, comes back as `returned`."""
        mesh = self.emission.mesh
        forward = resharding_path(before, after, shape, mesh)
        if not forward:
            return value
        backward = resharding_path(returned, before.reduced, shape, mesh)
        return self._redistributed(value, name, forward, backward, shape, dtype, differentiable)

    def _redistributed(
        self,
        value: Ref,
        name: str,
        forward: ReshardingPath,
        backward: ReshardingPath,
        shape: tuple[int, ...],
        dtype: str | None,
        differentiable: bool | None = None,
    ) -> Ref:
        operator, spec = self.operator, TensorSpec(shape, dtype or self.operator.results[0].dtype)
        differentiable = spec.floating if differentiable is None else differentiable
        backward = backward if differentiable else ()
        fresh = self.emission.fresh(name)
        self.emission.instructions.append(
            Redistribute(fresh, value, forward, backward, 1.0, differentiable, spec, operator.name, -1, operator.path)
        )
        return Ref(fresh)

    def operand_shape(self, index: int = 0) -> tuple[int, ...]:
        layout = self.sharding.operand_layouts(self.assignment)[index]
        return layout.local_shape(self.emission.graph.specs[self.operator.operands[index]].shape, self.emission.mesh)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        layout = self.sharding.result_layouts(self.assignment)[index]
        return layout.local_shape(self.operator.results[index].shape, self.emission.mesh)


class _Lowering(Emission):
    """The layouts and gradients of the values emitted so far, while the program grows operator by operator."""

    def __init__(
        self,
        graph: OperatorGraph,
        plan: Plan,
        options: LoweringOptions,
        outputs: Sequence[Layout],
        ordinals: Mapping[str, int],
        open_axes: Mapping[str, Iterable[str]],
    ) -> None:
        super().__init__(graph, plan.mesh, options, ordinals=dict(ordinals))
        self.plan, self.output_layouts, self.open_axes = plan, outputs, open_axes
        self.shardings = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        self.layouts: dict[Ref, Layout] = {}  # of every global value, as its users receive it
        self.local: dict[Ref, Ref] = {}  # global value -> its slice in the program
        self.gradient: dict[Ref, bool] = {}
        self.slices: dict[tuple[Ref, Hashable, Hashable], Ref] = {}  # at uses; see `_edge`
        self.added_wide: set[Ref] = set()  # partial sums that the ranks have in fp32
        for source in graph.sources:
            ref = Ref(source.id)
            self.layouts[ref] = plan.inputs[source.name] if source.kind == "input" else plan.tensors[source.name]
            self.local[ref], self.gradient[ref] = ref, source.trainable
            self.names.add(source.id)
        self.reductions = self._reductions()

    def program(self) -> Program:
        for operator in self.graph.operators:
            self._operator(operator)
        loss_axes: tuple[str, ...] = ()
        if self.options.partial_loss and not self.output_layouts:
            (loss,) = self.graph.outputs
            loss_axes = self.mesh.sorted(self.layouts[loss].partial)
            outputs: tuple[Ref, ...] = (self.local[loss],)
        else:
            wanted = self.output_layouts or [
                Layout.replicated(len(self.graph.specs[ref].shape)) for ref in self.graph.outputs
            ]
            outputs = tuple(
                self._handed_on(ref, layout, f"{ref.id}_output", self.gradient[ref])
                for ref, layout in zip(self.graph.outputs, wanted, strict=True)
            )
        updates = tuple(
            (buffer, self._handed_on(ref, self.layouts[Ref(buffer)], f"{buffer}_update", False))
            for buffer, ref in self.graph.updates
        )
        splits = {operator.name: operator.batch_slice for operator in self.graph.operators}
        return Program(
            self.mesh,
            self.graph.sources,
            {source.id: stored(self.layouts[Ref(source.id)], source.spec, self.mesh) for source in self.graph.sources},
            tuple(self.instructions),
            outputs,
            self.reductions,
            self.graph.parameter_order,
            bool(self.ordinals) or any(KEY in step.operands for step in self.instructions),
            loss_axes,
            updates,
            self.plan.recompute,
            self._replicas(),
            {name: (split.name, split.index) for name, split in splits.items() if split is not None},
            self.graph.without_gradient,
        )

    def _replicas(self) -> dict[Ref, tuple[str, ...]]:
        """Over which axes ranks hold the same of a value, where the plan slices what recomputed modules store."""
        if self.plan.recompute is None or not self.plan.recompute.slices_inputs:
            return {}
        layouts = {self.local[ref]: layout for ref, layout in self.layouts.items()}
        layouts |= {ref: layout for (_, layout, _), ref in self.slices.items() if isinstance(layout, Layout)}
        axes = {
            ref: [axis for axis in layout.replica_axes(self.mesh) if axis not in layout.partial]
            for ref, layout in layouts.items()
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
        widened = self.computes_wide(operator, natural)
        if widened:
            dtypes = [self.graph.specs[ref].dtype for ref in operator.operands]
            edges = [
                local if wide(dtype) == dtype else self._cast(local, wide(dtype), operator.name, operator.path)
                for local, dtype in zip(edges, dtypes, strict=True)
            ]
        slices = iter(edges)
        args, kwargs = rewrite(
            (operator.args, operator.keywords), lambda leaf: next(slices) if isinstance(leaf, Ref) else leaf
        )
        result = self.emit(operator, sharding, planned.assignment, args, kwargs)
        if isinstance(result, Ref):
            result = tuple(Ref(result.id, index) for index in range(len(operator.results)))
        trains = any(self.gradient[ref] for ref in operator.operands) and operator.op not in CONSTANT_TO_AUTOGRAD
        for index, spec in enumerate(operator.results):
            ref = Ref(operator.id, index)
            self.gradient[ref] = trains and spec.floating
            self.local[ref] = result[index]
            self.layouts[ref] = natural[index]
            if widened:
                self.added_wide.add(ref)
            if planned.outputs is not None and planned.outputs[index] != natural[index]:
                after = planned.outputs[index]
                gradient = self.gradient[ref] and operator.id in self.graph.returning
                back, scale = _returned(after.reduced, natural[index], self.mesh) if gradient else (None, 1.0)
                name = f"{operator.id}_out"
                self.local[ref] = self._redistribute(
                    ref, after, back, name, operator.name, operator.path, scale=scale
                )  # fmt: skip
                self.layouts[ref] = after
                self.added_wide.discard(ref)

    def _cast(self, value: Ref, dtype: str, operator: str, path: tuple[str, ...]) -> Ref:
        fresh = self.fresh(f"{value.id}_as_{dtype}")
        self.instructions.append(Compute(fresh, "aten.to.dtype", (value, getattr(torch, dtype)), (), operator, path))
        return Ref(fresh)

    def _edge(self, operator: Operator, position: int, ref: Ref, wanted: Layout, returned: Layout) -> Ref:
        """The slice of `ref` that operand `position` needs: one redistribution for all uses that need the same slice
        and return the same kind of gradient. Every use of a trained parameter has its own, which batch splits share."""
        source, have, spec = self.graph.by_id[ref.id], self.layouts[ref], self.graph.specs[ref]
        gradient = self.gradient[ref] and operator.id in self.graph.returning
        parameter = isinstance(source, Source) and source.kind == "parameter"
        key: tuple[Ref, Hashable, Hashable] = (ref, wanted, returned if gradient else None)
        if gradient and parameter:
            key = (ref, operator.id if operator.batch_slice is None else operator.batch_slice.of, position)
        if key not in self.slices:
            back, scale = _returned(returned, have, self.mesh) if gradient else (None, 1.0)
            if gradient and parameter:
                left = left_axes(have, returned, spec.shape, self.mesh)
                back, scale = (returned, Layout(have.dims, left)), self._scale(source.name, left)
            self.slices[key] = self._redistribute(
                ref, wanted, back, f"{ref.id}_for_{operator.id}", operator.name, operator.path, position, scale
            )
        return self.slices[key]

    def _handed_on(self, ref: Ref, wanted: Layout, name: str, gradient: bool) -> Ref:
        """The slice of a value that leaves the program, in the layout `wanted`."""
        back, scale = _returned(wanted, self.layouts[ref], self.mesh) if gradient else (None, 1.0)
        return self._redistribute(ref, wanted, back, name, self.graph.by_id[ref.id].name, (), scale=scale)

    def _redistribute(
        self,
        ref: Ref,
        wanted: Layout,
        back: tuple[Layout, Layout] | None,
        name: str,
        operator: str,
        path: tuple[str, ...],
        position: int = -1,
        scale: float = 1.0,
    ) -> Ref:
        """The slice of `ref` in the layout `wanted`; what ranks add up in fp32 is rounded after it. `back` are the
        layouts between which its gradient is carried, None without one."""
        spec, have = self.graph.specs[ref], self.layouts[ref]
        sent, scales = replace(spec, dtype=wide(spec.dtype)) if ref in self.added_wide else spec, [scale]

        def carried(value: Ref, spec: TensorSpec, before: Layout, after: Layout, back: Pair | None) -> Ref:
            forward = resharding_path(before, after, spec.shape, self.mesh)
            backward = () if back is None else resharding_path(*back, spec.shape, self.mesh)
            if not forward and not backward and scales[-1] == 1.0:
                return value
            id = self.fresh(name)
            self.instructions.append(
                Redistribute(id, value, forward, backward, scales[-1], back is not None, spec, operator, position, path)
            )
            return Ref(id)

        def computed(target: str, *args: Any, multiple: bool = False) -> Ref:
            id = self.fresh(f"{name}_{target.split('.')[1]}")
            self.instructions.append(Compute(id, target, args, (), operator, path, multiple))
            return Ref(id)

        def section_by_section(
            value: Ref, packed: FusedSections, before: Layout, after: Layout, back: Pair | None
        ) -> Ref:
            shapes = [unpacked(spec.shape, packed, (size,)) for size in packed.sizes]
            if len(set(shapes)) > 1:
                sizes = [before.local_shape(shape, self.mesh)[packed.dim] for shape in shapes]
                parts = computed("aten.split_with_sizes.default", value, sizes, packed.dim, multiple=True)
                sections = [replace(sent, shape=shape, packed=None) for shape in shapes]
                pieces = [carried(Ref(parts.id, i), one, before, after, back) for i, one in enumerate(sections)]
                return computed("aten.cat.default", pieces, packed.dim)
            apart = replace(sent, shape=unpacked(spec.shape, packed, (len(shapes), packed.sizes[0])), packed=None)
            first, last = _apart(before, packed), _apart(after, packed)
            returned = None if back is None else (_apart(back[0], packed), _apart(back[1], packed))
            value = computed("aten.reshape.default", value, first.local_shape(apart.shape, self.mesh))
            value = carried(value, apart, first, last, returned)
            return computed("aten.reshape.default", value, after.local_shape(spec.shape, self.mesh))

        def hop(value: Ref, before: Layout, after: Layout, back: Pair | None) -> Ref:
            striped = any(isinstance(stored(one, spec, self.mesh), Stripes) for one in (before, after))
            if spec.packed is not None and striped:
                return section_by_section(value, spec.packed, before, after, back)
            return carried(value, sent, before, after, back)

        value, packed = self.local[ref], spec.packed
        if packed is None or have.dims[packed.dim] == wanted.dims[packed.dim]:  # the same order before and after
            value = carried(value, sent, have, wanted, back)
        elif len({type(stored(one, spec, self.mesh)) for one in (have, wanted) if one.dims[packed.dim]}) == 1:
            value = hop(value, have, wanted, back)
        else:  # from stripes to one block, or back
            between = _complete(have, packed.dim)
            middle = None if back is None else Layout(between.dims, back[1].partial)
            value = hop(value, have, between, None if back is None or middle is None else (middle, back[1]))
            scales.append(1.0)
            value = hop(value, between, wanted, None if back is None or middle is None else (back[0], middle))
        if ref in self.added_wide and value != self.local[ref]:
            return self._cast(value, spec.dtype, operator, path)
        return value

    def _reductions(self) -> dict[str, tuple[str, ...]]:
        """Per trainable parameter: the union over its uses of the axes that are left (all replica axes for a
        sharded optimizer)."""
        reductions = {}
        for source in self.graph.of_kind("parameter"):
            if not source.trainable:
                continue
            have = self.layouts[Ref(source.id)]
            if self.options.sharded_optimizer:
                reductions[source.name] = have.replica_axes(self.mesh)
                continue
            left = set(self.open_axes.get(source.name, ()))
            for operator, position in self.graph.users[Ref(source.id)]:
                if operator.id in self.graph.returning:
                    gradients = self.shardings[operator.id].gradient_layouts(self._planned(operator).assignment)
                    left |= left_axes(have, gradients[position], source.spec.shape, self.mesh)
            reductions[source.name] = self.mesh.sorted(left)
        return reductions

    def _scale(self, name: str, left: frozenset[str]) -> float:
        """What makes the later sum right: axes over which this use's gradient is already complete are counted once, and
        a sharded optimizer's division by the world size is undone."""
        complete = self.mesh.product(axis for axis in self.reductions[name] if axis not in left)
        return self.mesh.size / complete if self.options.sharded_optimizer else 1 / complete
