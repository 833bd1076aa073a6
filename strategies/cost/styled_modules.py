"""The layouts of a trainer of local tensors that slices modules one by one, each by a style, over the same mesh axes.

Such a trainer moves values at the borders of its linear layers and tables alone, and adds up no gradient elsewhere. So
over the axes of its modules an operator takes its operands as they come, and only a linear layer or a table has a
result that is a partial sum. All other axes slice the rows of the batch; what they slice follows from the batch.
Source: transformers.distributed.tensor_parallel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from strategies.core.experts import RESHAPED, experts, last_products, matrices_of, parameter_of
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, TensorSpec, modules_around
from strategies.core.heads import Split, splitting
from strategies.core.layout import Layout
from strategies.cost.resharding_matrix import PARTIAL, REPLICATED, Booleans, Integers, Seconds
from strategies.rules.sharding import Assignment, Sharding

SCALING = ("mul", "neg", "to", "div")
"""What partial sums may go through, the last one as the dividend."""
RESIZING = "resizing"
"""Among the styles of AutoTP, which replaces layers, and gives modules the sizes of slices."""
FORBIDDEN = 1e4
"""Seconds of what no plan does; more than any step takes, and little enough to be added to seconds."""


def halves(spec: TensorSpec, dim: int) -> bool:
    """Whether a tensor holds two sections of one size along `dim`: what packed styles slice."""
    packed = spec.packed
    return packed is not None and packed.dim == dim and len(packed.sizes) == 2 and len({*packed.sizes}) == 1


def packable(operator: Operator, weight: Source, copies: bool) -> bool:
    """Whether packed_colwise slices a linear layer: it takes a bias for one section, and where there are copies of a
    module, whose FSDP slices rows again, it loads the sections of a matrix in another order (transformers 5.23)."""
    return halves(weight.spec, 0) and len(operator.operands) == 2 and not copies


@dataclass(frozen=True)
class ModuleLayouts:
    """Layouts of a trainer that slices modules over the same mesh axes, and the rows of the batch over the others.

    Attributes:
        graph: of a training step.
        shardings: the rule of every operator, by id.
        axes: that slice modules.
        rows: by operator, what the other axes slice.
    """

    graph: OperatorGraph
    shardings: Mapping[str, Sharding]
    axes: frozenset[str]
    rows: Mapping[str, Assignment]

    layers_differ: ClassVar[bool] = True
    """Whether the trainer may slice repeated layers differently."""

    @cached_property
    def options(self) -> dict[str, tuple[str, ...]]:
        """The factors of every operator that the axes may slice."""
        return {
            operator.id: tuple(
                factor for factor in self.shardings[operator.id].factors if self._may_slice(operator, factor)
            )
            for operator in self.graph.operators
        }

    def _may_slice(self, operator: Operator, factor: str) -> bool:
        raise NotImplementedError

    @property
    def together(self) -> Sequence[tuple[Operator, Operator, bool]]:
        """Pairs of operators whose candidates must be compatible; True: both are sliced or none, False: the second one
        with the first alone."""
        return ()

    def compatible(self, pair: tuple[Operator, Operator, bool], chosen: tuple[Assignment, Assignment]) -> bool:
        """Whether both operators of a pair are sliced as one module must be."""
        raise NotImplementedError

    def use(self, user: Operator, position: int) -> Hashable:
        """What `penalty` depends on besides layouts: how an operator may take one of its operands."""
        raise NotImplementedError

    def penalty(self, given: Sequence[Layout], wanted: Sequence[Layout], use: Any) -> Seconds:
        """Seconds [given, wanted] that keep a search from reshardings that the trainer has not."""
        raise NotImplementedError

    def gathered(self, operator: Operator, sliced: Integers, axes: Sequence[str]) -> tuple[Booleans, Booleans]:
        """Which candidates of an operator may hand on their result as it is made, and which gathered over the axes."""
        none = np.zeros(len(sliced), dtype=bool)
        return ~none, none

    def legal(self, operator: Operator, sliced: Integers, axes: Sequence[str]) -> Booleans:
        """Which candidates of an operator there are, by the factor that every axis slices [candidates, axes]."""
        factors, rows = self.shardings[operator.id].factors, self.rows[operator.id]
        legal = np.ones(len(sliced), dtype=bool)
        own = [place for place, axis in enumerate(axes) if axis in self.axes]
        for place, axis in enumerate(axes):
            if place in own:
                legal &= sliced[:, place] == sliced[:, own[0]]
                legal &= np.isin(sliced[:, place], [REPLICATED, *map(factors.index, self.options[operator.id])])
            else:
                along = next((factors.index(factor) for factor, used in rows.items() if axis in used), REPLICATED)
                legal &= sliced[:, place] == along
        return legal

    def place(self, layout: Layout) -> int:
        """The dim of a layout that the axes slice, REPLICATED or PARTIAL."""
        if self.axes & layout.partial:
            return PARTIAL
        return next((dim for dim, used in enumerate(layout.dims) if self.axes & {*used}), REPLICATED)

    def kind(self, operator: Operator) -> object:
        """What the candidates of an operator and the uses of its operands depend on."""
        return (
            self.options[operator.id],
            tuple(self.rows[operator.id].items()),
            tuple(self.use(operator, position) for position in range(len(operator.operands))),
        )


def sliceable(operator: Operator, graph: OperatorGraph) -> bool:
    """Whether styles slice the weight of an operator: a linear layer, or a table whose indices come from outside of its
    module, since a trainer lays out what a module receives (tables of OPT compute theirs from a mask). Not a layer
    whose bias is tied to a parameter of another module, whose name comes first (heads of BERT): it is laid out there;
    nor one whose module does not say its sizes (routers of OLMoE).
    """
    makers = [graph.by_id[ref.id] for ref in operator.operands]
    if operator.op == "linear":
        return operator.id not in graph.fixed_sizes and all(
            one.name.rpartition(".")[0] == operator.module for one in makers[2:] if isinstance(one, Source)
        )
    inside = any(isinstance(maker, Operator) and maker.module == operator.module for maker in makers)
    return operator.op == "embedding" and not inside


def is_within(module: str, paths: Collection[str]) -> bool:
    """Whether a module is in one of these."""
    return any(f"{module}.".startswith(f"{path}.") for path in paths)


def users_inside(graph: OperatorGraph, maker: Operator, layer: Operator) -> list[tuple[Operator, int]]:
    """The uses of a result in the module of `layer`."""
    return [use for use in graph.users[Ref(maker.id)] if is_within(use[0].module, [layer.module])]


def returned_by(graph: OperatorGraph, layer: Operator) -> Operator | None:
    """The operator that computes what the module of a layer returns: the layer itself, or the last one of a chain from
    it; None where its result is used in several places of the module, or outside of it as well."""
    last = layer
    while inside := users_inside(graph, last, layer):
        if len(graph.users[Ref(last.id)]) > 1:
            return None
        last = inside[0][0]
    return last


def of_own_parameters(graph: OperatorGraph) -> frozenset[str]:
    """The ids of operators that compute from parameters of their own module and buffers alone, such as 1 + weight of a
    norm. Of what they make, as of the parameters, a trainer may have partial gradients, which it adds up."""
    found: set[str] = set()

    def own(maker: Operator | Source, module: str) -> bool:
        if isinstance(maker, Operator):
            return maker.id in found and maker.module == module
        names = (maker.name, *maker.aliases)
        return maker.kind == "buffer" or (
            maker.kind == "parameter" and any(name.rpartition(".")[0] == module for name in names)
        )

    for operator in graph.operators:
        if operator.operands and all(own(graph.by_id[ref.id], operator.module) for ref in operator.operands):
            found.add(operator.id)
    return frozenset(found)


def refuses_slices(operator: Operator, sharding: Sharding, factor: str, graph: OperatorGraph) -> bool:
    """Whether a view splits the dim of a factor by a size that the model fixes, which torch refuses for a slice, or in
    a module that fixes another size (biases for all heads); or while another size is -1, as view(b, -1, heads, d) does:
    of a slice it would make as many heads, of half of the tokens. AutoTP changes the sizes of a module."""
    if operator.op not in ("_unsafe_view", "reshape", "view") or factor not in sharding.operands[0]:
        return False
    sizes = operator.args[1]
    taken, made = sharding.operands[0].index(factor), sharding.results[0].index(factor)
    splits = operator.results[0].shape[made] < graph.operand_specs(operator)[0].shape[taken]
    return splits and (operator.id in graph.fixed_sizes or (sizes[made] != -1 and -1 in sizes))


@dataclass(frozen=True)
class StyledModules(ModuleLayouts):
    """What the styles of a trainer allow in one graph.

    Attributes:
        styles: the names of styles that the trainer has.
    """

    styles: Collection[str]

    layers_differ: ClassVar[bool] = False

    def gathered(self, operator: Operator, sliced: Integers, axes: Sequence[str]) -> tuple[Booleans, Booleans]:
        """Which candidates of an operator may hand on their result as it is made, and which gathered over the axes."""
        none, layer, sharding = np.zeros(len(sliced), dtype=bool), self._layer(operator), self.shardings[operator.id]
        factor = None if layer is None else next(reversed(sharding.results[0]), None)
        if factor is None or not (own := [place for place, axis in enumerate(axes) if axis in self.axes]):
            return ~none, none
        assert layer is not None
        columns = sliced[:, own[0]] == sharding.factors.index(factor)
        if any(layer.id == one.id for split in self._resized for one in split.split):
            return ~columns if self._gathers(layer) else ~none, none
        if layer.op == "embedding":
            return ~columns, columns
        return ~columns if self._gathers(layer) else ~none, columns if "colwise_gather_output" in self.styles else none

    def use(self, user: Operator, position: int) -> bool:
        """Whether an operator may take slices of the last dim of a replicated value."""
        rows = "rowwise_split_input" in self.styles and user.op == "linear" and position == 0
        return rows and self._weight(user) is not None and not self._made_inside(user.operands[0], user)

    def penalty(self, given: Sequence[Layout], wanted: Sequence[Layout], use: Any) -> Seconds:
        have, want = ([self.place(layout) for layout in layouts] for layouts in (given, wanted))
        return np.where(_forbidden(have, want, len(given[0].dims), use), FORBIDDEN, 0.0)

    def violated(self, chosen: Mapping[str, Assignment], handed: Callable[[Ref], Layout]) -> Iterator[Operator]:
        """The operators of a plan that the trainer would lay out otherwise.

        Args:
            chosen: by operator.
            handed: the layout in which a value is handed on.
        """
        wanted = {one.id: self.shardings[one.id].operand_layouts(chosen[one.id]) for one in self.graph.operators}
        for operator in self.graph.operators:
            taken = {factor for factor, used in chosen[operator.id].items() if self.axes & {*used}}
            legal = taken <= {*self.options[operator.id]}
            for position, (ref, layout) in enumerate(zip(operator.operands, wanted[operator.id], strict=True)):
                maker, have = self.graph.by_id[ref.id], self.place(handed(ref))
                last = len(layout.dims) - 1
                layer = self._layer(maker) if isinstance(maker, Operator) else None
                if layer is not None and have == last:
                    uses = {self.place(wanted[user.id][at]) for user, at in self.graph.users[ref]}
                    gathers = self._gathers(layer) or ("colwise_gather_output" in self.styles and uses == {REPLICATED})
                    have = REPLICATED if gathers else have
                places = [have], [self.place(layout)]
                legal = legal and not _forbidden(*places, len(layout.dims), self.use(operator, position)).any()
            if not legal:
                yield operator

    def _weight(self, operator: Operator) -> int | None:
        """The position of the weight of a linear layer or table that a style may slice."""
        if not sliceable(operator, self.graph) or is_within(operator.module, self.graph.unsliced_modules):
            return None
        for position, ref in enumerate(operator.operands):
            source = self.graph.by_id[ref.id]
            if isinstance(source, Source) and source.kind == "parameter" and len(source.spec.shape) == 2:
                return position if f"{operator.module}.weight" in (source.name, *source.aliases) else None
        return None

    def _gathers(self, operator: Operator) -> bool:
        """Whether the styles hand on slices of columns gathered alone: of a table, and of a layer whose weight is
        packed otherwise than packed_colwise slices it."""
        position = self._weight(operator)
        weight = None if position is None else self.graph.by_id[operator.operands[position].id]
        if operator.op == "embedding" or not isinstance(weight, Source):
            return operator.op == "embedding"
        packed = weight.spec.packed is not None and weight.spec.packed.dim == 0
        return packed and not ("packed_colwise" in self.styles and packable(operator, weight, any(self.rows.values())))

    def _layer(self, operator: Operator) -> Operator | None:
        """The layer whose module returns what an operator computes."""
        return self._returned.get(operator.id)

    @cached_property
    def _returned(self) -> dict[str, Operator]:
        layers = (one for one in self.graph.operators if self._weight(one) is not None)
        return {last.id: layer for layer in layers if (last := returned_by(self.graph, layer)) is not None}

    def _at_borders(self, operator: Operator, dim: int) -> bool:
        """Whether slices of a weight along `dim` mean the same where styles act on what the module receives and
        returns: partial sums may be scaled before they are reduced, but for a bias, and a table's columns must be what
        the module returns. AutoTP replaces a module by the layer alone."""
        if RESIZING in self.styles:
            return self._computing[operator.module] == {operator.op}
        if (operator.op == "linear") == (dim == 0):
            return operator.op == "linear" or returned_by(self.graph, operator) is not None
        waiting = users_inside(self.graph, operator, operator)
        if waiting and len(operator.operands) > 2:
            return False
        while waiting:
            user, position = waiting.pop()
            others = [ref for place, ref in enumerate(user.operands) if place != position]
            if user.op not in SCALING[: len(SCALING) - bool(position)] or any(
                self.graph.specs[ref].elements > 1 for ref in others
            ):
                return False
            waiting += users_inside(self.graph, user, operator)
        return True

    def _made_inside(self, ref: Ref, layer: Operator) -> bool:
        """Whether a value is computed in the module of `layer`."""
        maker = self.graph.by_id[ref.id]
        return isinstance(maker, Operator) and is_within(maker.module, [layer.module])

    @cached_property
    def _computing(self) -> dict[str, set[str]]:
        """By module, the operators in it and in modules within."""
        found = defaultdict[str, set[str]](set)
        for operator in self.graph.operators:
            for path in modules_around(tuple(operator.module.split("."))):
                found[path].add(operator.op)
        return found

    @cached_property
    def _routed(self) -> tuple[frozenset[str], frozenset[str]]:
        """The ids of the parameters of experts that styles slice by expert, and of those that they slice within each
        expert."""
        by_expert = experts(self.graph) if "grouped_gemm" in self.styles else {}
        first, second = (
            frozenset(one.id for own in each.values() for one in own) for each in (by_expert, self._within)
        )
        return first, second

    @cached_property
    def _of_parameters(self) -> frozenset[str]:
        return of_own_parameters(self.graph)

    @cached_property
    def _within(self) -> dict[str, tuple[Source, ...]]:
        return matrices_of(self.graph) if "moe_tp_experts" in self.styles else {}

    @cached_property
    def _last(self) -> frozenset[str]:
        """The ids of the products whose partial sums a module of experts adds up."""
        found = (last_products(path, own, self.graph) for path, own in self._within.items())
        return frozenset().union(*found)

    def _slices_experts(self, operator: Operator, factor: str) -> bool:
        """Whether a factor slices the parameters of experts as a style does: by expert, or columns and then rows of
        each. The module adds up partial results, and the gradients of all that it takes."""
        by_expert, within = self._routed
        for ref, dims in zip(operator.operands, self.shardings[operator.id].operands, strict=True):
            source, spec = parameter_of(self.graph, ref), self.graph.specs[ref]
            if source is None or factor not in dims:
                continue
            dim = dims.index(factor)
            if dim == 0 and source.id in by_expert:
                return True
            if dim > 0 and source.id in within and (spec.packed is None or halves(spec, dim)):
                sums = factor in self.shardings[operator.id].sums
                return operator.op in RESHAPED or sums == (operator.id in self._last)
        return False

    @cached_property
    def _resized(self) -> tuple[Split, ...]:
        """The layers of the modules that AutoTP gives the sizes of slices, once it slices anything in them."""
        return tuple(splitting(self.graph).values()) if RESIZING in self.styles else ()

    @cached_property
    def together(self) -> Sequence[tuple[Operator, Operator, bool]]:
        """The operators that take the parameters of one module of experts: all of them some experts, or none. Of a
        module with sizes, the layers whose columns it splits: all are sliced, or nothing in it is."""
        pairs: list[tuple[Operator, Operator, bool]] = []
        for own in experts(self.graph).values() if self._routed[0] else ():
            ids = {source.id for source in own}
            taking = (one for one in self.graph.operators if ids & {ref.id for ref in one.operands})
            pairs += [(*pair, True) for pair in pairwise(taking)]
        for one in self._resized:
            pairs += [(*pair, True) for pair in pairwise(one.split)]
            pairs += [(one.split[0], other, False) for other in one.others]
        return tuple(pairs)

    def compatible(self, pair: tuple[Operator, Operator, bool], chosen: tuple[Assignment, Assignment]) -> bool:
        *operators, both = pair
        experts_of = [self._by_expert(operator, one) for operator, one in zip(operators, chosen, strict=True)]
        first, second = (self._slices_weight(operator, one) for operator, one in zip(operators, chosen, strict=True))
        return experts_of[0] == experts_of[1] and (first == second if both else first or not second)

    def _slices_weight(self, operator: Operator, chosen: Assignment) -> bool:
        weight = self._weight(operator)
        layout = None if weight is None else self.shardings[operator.id].operand_layouts(chosen)[weight]
        return layout is not None and bool(self.axes & {*layout.axes})

    def _by_expert(self, operator: Operator, chosen: Assignment) -> bool:
        """Whether an operator takes the parameter of some experts alone."""
        layouts = self.shardings[operator.id].operand_layouts(chosen)
        taken = zip(operator.operands, layouts, strict=True)
        return any(self.axes & {*layout.dims[0]} for ref, layout in taken if ref.id in self._routed[0])

    def _may_slice(self, operator: Operator, factor: str) -> bool:
        if self._slices_experts(operator, factor):
            return True
        sharding, weight = self.shardings[operator.id], self._weight(operator)
        own = None if weight is None else sharding.operands[weight]
        dim = own.index(factor) if own is not None and factor in own else None
        if dim is not None and not self._at_borders(operator, dim):
            return False
        if operator.op == "embedding" and dim is not None:
            return ("embedding_rowwise", "embedding_colwise")[dim] in self.styles
        if factor in sharding.sums and dim != 1:
            return False
        if RESIZING not in self.styles and refuses_slices(operator, sharding, factor, self.graph):
            return False
        found = dim is not None
        for ref, dims in zip(operator.operands, sharding.operands, strict=True):
            source = self.graph.by_id[ref.id]
            parameter = isinstance(source, Source) and source.kind == "parameter"
            if parameter or (
                ref.id in self._of_parameters and isinstance(source, Operator) and source.module == operator.module
            ):
                if factor in dims and dim is None:
                    return False
            elif factor in dims:
                if isinstance(source, Source):
                    return False
                found = True
            elif ref in self.graph.trained and operator.id in self.graph.returning and dim != 0:
                return False  # its gradient would be a partial sum
        return found and (dim is None or ("colwise", "rowwise")[dim] in self.styles)


def _forbidden(have: Sequence[int], want: Sequence[int], dims: int, splits: bool) -> Booleans:
    """Which reshardings no style has, [have, want]: both are the dim that the axes slice, REPLICATED or
    PARTIAL."""
    before, after, last = np.array(have)[:, None], np.array(want)[None, :], dims - 1
    allowed = (before == after) | ((before == PARTIAL) & (after == REPLICATED))
    if splits:
        allowed |= (before == REPLICATED) & (after == last)
    return np.asarray(~allowed)
