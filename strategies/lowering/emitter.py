"""The `Local` that rules' local programs write to: what they call becomes instructions of the program being lowered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strategies.core.graph import Operator, OperatorGraph, Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan
from strategies.core.program import KEY, Compute, Instruction, LoweringOptions, Ordinal, RankValue, Redistribute
from strategies.resharding.path import resharding_path
from strategies.rules.sharding import Sharding


class Lowering(Protocol):
    """What an emitter needs of the lowering that it serves."""

    graph: OperatorGraph
    mesh: Mesh
    options: LoweringOptions
    instructions: list[Instruction]

    def fresh(self, name: str) -> str: ...

    def ordinal(self, operator: Operator) -> int: ...


@dataclass
class Emitter:
    """The `Local` of one operator."""

    lowering: Lowering
    operator: Operator
    sharding: Sharding
    planned: OperatorPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def exact(self) -> bool:
        return self.lowering.options.exact

    @property
    def key(self) -> Ref:
        return KEY

    @property
    def ordinal(self) -> int:
        return Ordinal(self.lowering.ordinal(self.operator))

    def call(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        multiple = self.operator.multiple and target in (self.operator.target, "local.seeded")
        return self._compute(target, args, kwargs, multiple)

    def several(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        return self._compute(target, args, kwargs, True)

    def _compute(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], multiple: bool) -> Ref:
        own = target == self.operator.target or target.startswith("aten")
        fresh = self.lowering.fresh(self.operator.id if own else f"{self.operator.id}_{target.split('.')[1]}")
        self.lowering.instructions.append(
            Compute(fresh, target, args, tuple(kwargs.items()), self.operator.name, self.operator.path, multiple)
        )
        return Ref(fresh)

    def slices(self, *factors: str) -> int:
        return math.prod(self.lowering.mesh.product(self.planned.assignment.get(factor, ())) for factor in factors)

    def position(self, factors: str | tuple[str, ...], stride: int = 1) -> RankValue:
        return RankValue(self._axes((factors,) if isinstance(factors, str) else factors), stride)

    def size(self, factor: str) -> int:
        return self.sharding.sizes[factor]

    def _axes(self, factors: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for factor in factors for axis in self.planned.assignment.get(factor, ()))

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
        spec = TensorSpec(tuple(shape), dtype or self.operator.results[0].dtype)
        return self._carried(value, f"{value.id}_sum", before, after, before, spec, differentiable)

    def gather_over(self, value: Ref, *factors: str, shape: Sequence[int] = (), dtype: str | None = None) -> Ref:
        axes, whole = self._axes(factors), Layout.replicated(len(shape) + 1)
        before, partial = Layout((axes, *whole.dims[1:])), Layout(whole.dims, frozenset(axes))
        spec = TensorSpec((self.slices(*factors), *shape), dtype or self.operator.results[0].dtype)
        row = self.call("aten.unsqueeze.default", value, 0)
        return self._carried(row, f"{value.id}_gathered", before, whole, partial, spec, spec.floating)

    def _carried(
        self,
        value: Ref,
        name: str,
        before: Layout,
        after: Layout,
        returned: Layout,
        spec: TensorSpec,
        differentiable: bool,
    ) -> Ref:
        """`value` carried from layout `before` to `after`; its gradient comes back as `returned`."""
        mesh = self.lowering.mesh
        forward = resharding_path(before, after, spec.shape, mesh)
        if not forward:
            return value
        backward = resharding_path(returned, before.whole, spec.shape, mesh) if differentiable else ()
        fresh, operator = self.lowering.fresh(name), self.operator
        self.lowering.instructions.append(
            Redistribute(fresh, value, forward, backward, 1.0, differentiable, spec, operator.name, -1, operator.path)
        )
        return Ref(fresh)

    def operand_shape(self, index: int = 0) -> tuple[int, ...]:
        layout = self.sharding.operand_layouts(self.planned.assignment)[index]
        return layout.local_shape(self.lowering.graph.specs[self.operator.operands[index]].shape, self.lowering.mesh)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        layout = self.sharding.result_layouts(self.planned.assignment)[index]
        return layout.local_shape(self.operator.results[index].shape, self.lowering.mesh)
