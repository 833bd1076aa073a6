"""A model as an operator graph: one frozen node per operator, in execution order, with shapes, module path and source
line.

The graph is plain data (it pickles without torch objects beyond small constants), so capture happens once per run and
every rank lowers the same graph. Values are named by `Ref`s; sources are what flows in (batch, parameters, buffers,
constants).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, TypeVar

from strategies.core.memo import Memo

Kind = Literal["input", "parameter", "buffer", "constant"]

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "bool": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip

CONSTANT_TO_AUTOGRAD = frozenset(
    """
    detach empty_like full_like histc new_empty new_full new_ones new_zeros ones_like rand_like randn_like zeros_like
    """.split()
)
"""Operators whose results have no gradient though they are floating-point: it does not reach their operands."""


@cache
def modules_around(path: tuple[str, ...]) -> tuple[str, ...]:
    """The paths of the modules around an operator, outermost first, from their names."""
    return tuple(".".join(path[: end + 1]) for end in range(len(path)))


def wide(dtype: str) -> str:
    """The dtype in which numbers of `dtype` are added up: float32, or wider if it is wider."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


@dataclass(frozen=True)
class FusedSections:
    """Several tensors in one, one behind the other along `dim`, of `sizes` there: the sections of a fused weight."""

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Global shape and dtype (torch's name without the prefix) of a tensor. A slice along the dim in which a tensor is
    `packed` is a stripe of every section, if every section divides into equal ones."""

    shape: tuple[int, ...]
    dtype: str
    packed: FusedSections | None = None

    @property
    def floating(self) -> bool:
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Ref:
    """Result `index` of operator `id`, or the source `id`."""

    id: str
    index: int = 0


@dataclass(frozen=True)
class Source:
    """A value that flows into the graph. `name` is the input's name or the fully qualified name of the tensor in
    the model."""

    id: str
    kind: Kind
    name: str
    spec: TensorSpec
    trainable: bool = False
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (tied weights)."""


@dataclass(frozen=True)
class BatchSlice:
    """The rows of the batch for which an operator is computed: `index`, `index + count`, ... They are `rows` in number
    along dim `dim` of the results (the outermost one of the dims flattened there). `of` and `name` are the id and the
    plan name of the operator in the model."""

    index: int
    count: int
    dim: int
    rows: int
    of: str
    name: str


@dataclass(frozen=True)
class Operator:
    """One call of a torch operator on the global tensors.

    `args` and `kwargs` are plain data with `Ref`s in place of tensors; `op` is torch's name without overload (`relu`),
    with its library or module where it is not torch's own (`mylib::scan`, `kernels::Scan`); `name` is the unique plan
    name `module.path[.label][@k]`; `path` are the nested module calls that lead here, each relative to the one before.
    """

    id: str
    name: str
    module: str
    op: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[TensorSpec, ...]
    multiple: bool
    source: str
    path: tuple[str, ...]
    batch_slice: BatchSlice | None = None
    """The slice of the batch that this operator computes, where the batch is split."""
    lines: tuple[str, ...] = ()
    """The lines of factor notation that its author declared for it (`strategies.sharding_rule`)."""

    @cached_property
    def operands(self) -> tuple[Ref, ...]:
        """The tensor operands, in the order of the arguments (lists flattened)."""
        return tuple(refs((self.args, tuple(value for _, value in self.kwargs))))

    @cached_property
    def keywords(self) -> dict[str, Any]:
        return dict(self.kwargs)

    @property
    def label(self) -> str:
        """What it does, in plan names: `op` without library (capture names normalization that returns its statistics
        otherwise)."""
        return self.op.rpartition("::")[2].rpartition(".")[2].removesuffix("_training")

    @property
    def where(self) -> str:
        """The operator as errors name it."""
        return f"{self.name} ({self.op}{', ' + self.source if self.source else ''})"


@dataclass(frozen=True)
class OperatorGraph(Memo):
    """Sources, operators in execution order, and the outputs (the loss alone, for a training graph).

    Operators only compute: what the model writes into a buffer is an update, the buffer's value after the step.
    """

    sources: tuple[Source, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[Ref, ...]
    parameter_order: tuple[str, ...]
    """Names of all parameters and buffers of the model, in the model's own order."""
    updates: tuple[tuple[str, Ref], ...] = ()
    """The id of every buffer that is written, and its new value."""
    fixed_sizes: frozenset[str] = frozenset()
    """The ids of views that split a dim by a size that the model fixes, as far as that is known, and of linear layers
    in modules that do not say their sizes."""
    unsliced_modules: frozenset[str] = frozenset()
    """The paths of modules in which a trainer that changes their sizes may slice nothing."""
    rewritten: frozenset[str] = frozenset()
    """The lines of code that torch runs by other operators: what a mask selects, and transforms of functions."""

    @cached_property
    def specs(self) -> dict[Ref, TensorSpec]:
        specs = {Ref(source.id): source.spec for source in self.sources}
        for operator in self.operators:
            specs.update({Ref(operator.id, i): spec for i, spec in enumerate(operator.results)})
        return specs

    @cached_property
    def by_id(self) -> dict[str, Operator | Source]:
        nodes: tuple[Operator | Source, ...] = (*self.sources, *self.operators)
        return {node.id: node for node in nodes}

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def users(self) -> dict[Ref, tuple[tuple[Operator, int], ...]]:
        """The operators that use each value, with the operand's position."""
        uses_of: dict[Ref, list[tuple[Operator, int]]] = {ref: [] for ref in self.specs}
        for operator in self.operators:
            for position, ref in enumerate(operator.operands):
                uses_of[ref].append((operator, position))
        return {ref: tuple(uses) for ref, uses in uses_of.items()}

    @cached_property
    def trained(self) -> frozenset[Ref]:
        """The values that have a gradient."""
        trained = {Ref(source.id) for source in self.sources if source.trainable}
        for operator in self.operators:
            if operator.op not in CONSTANT_TO_AUTOGRAD and any(ref in trained for ref in operator.operands):
                trained |= {Ref(operator.id, i) for i, spec in enumerate(operator.results) if spec.floating}
        return frozenset(trained)

    @property
    def written(self) -> tuple[str, ...]:
        """The names of parameters that learn and that forward writes."""
        sources = (self.by_id[id] for id, _ in self.updates)
        return tuple(source.name for source in sources if isinstance(source, Source) and source.trainable)

    @cached_property
    def returning(self) -> frozenset[str]:
        """The operators to which a gradient comes back from the outputs: not those behind comparisons, indices,
        detach or zeros_like."""
        wanted, returning = set(self.outputs), set()
        for operator in reversed(self.operators):
            results = [Ref(operator.id, i) for i, spec in enumerate(operator.results) if spec.floating]
            if operator.op not in CONSTANT_TO_AUTOGRAD and not wanted.isdisjoint(results):
                returning.add(operator.id)
                wanted.update(operator.operands)
        return frozenset(returning)

    @cached_property
    def from_parameters(self) -> frozenset[str]:
        """The operators with a gradient that compute from parameters, and from no input, what other operators use."""
        fed = {Ref(source.id) for source in self.of_kind("input")}
        computed: set[str] = set()
        for operator in self.operators:
            results = [Ref(operator.id, index) for index in range(len(operator.results))]
            if not fed.isdisjoint(operator.operands):
                fed.update(results)
            elif operator.id in self.returning and not self.trained.isdisjoint(results):
                computed.add(operator.id)
        return frozenset(computed - {ref.id for ref in self.outputs})

    @cached_property
    def without_gradient(self) -> frozenset[str]:
        """The trainable parameters to which none comes back."""
        return frozenset(
            source.name
            for source in self.of_kind("parameter")
            if source.trainable and Ref(source.id) not in self.outputs
            if not any(operator.id in self.returning for operator, _ in self.users[Ref(source.id)])
        )

    @cached_property
    def looks(self) -> dict[str, int]:
        """A number per operator, by id: equal where operators have the same arguments, but for the names of values, and
        take and make values of the same shapes, with gradients, from parameters of one use or from parameters alone
        where the others do."""
        numbers: dict[tuple[Any, ...], int] = {}
        values: dict[tuple[Any, ...], int] = {}
        lone = {source.id for source in self.of_kind("parameter") if len(self.users[Ref(source.id)]) == 1}
        numbers_of_values = {
            ref: values.setdefault((spec, ref in self.trained, ref.id in lone), len(values))
            for ref, spec in self.specs.items()
        }
        return {
            operator.id: numbers.setdefault(
                (
                    operator.target,
                    _said(operator.args),
                    _said(operator.kwargs),
                    tuple([numbers_of_values[ref] for ref in operator.operands]),
                    operator.results,
                    operator.id in self.returning,
                    operator.id in self.from_parameters,
                ),
                len(numbers),
            )
            for operator in self.operators
        }

    def signature(self) -> tuple[Any, ...]:
        """What the graph computes, without where its source stands: equal for equal programs."""
        operators = tuple(
            (o.id, o.name, o.target, o.args, o.kwargs, o.results, o.path, o.lines) for o in self.operators
        )
        fixed = [sorted(one) for one in (self.fixed_sizes, self.unsliced_modules) if one]
        return self.sources, operators, self.outputs, self.parameter_order, self.updates, *fixed

    def of_kind(self, *kinds: Kind) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.kind in kinds)

    def operand_specs(self, operator: Operator) -> tuple[TensorSpec, ...]:
        return tuple(self.specs[ref] for ref in operator.operands)


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf of nested plain data (tuples, lists, dicts), in order."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def refs(value: Any) -> Iterator[Ref]:
    """Every `Ref` in nested plain data, in order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Ref))


def _said(value: Any) -> Any:
    """Nested plain data without the names of values; equal where its text is equal."""
    if isinstance(value, Ref):
        return "*"
    if isinstance(value, (tuple, list)):
        return type(value), *map(_said, value)
    if isinstance(value, dict):
        return dict, *[(key, _said(item)) for key, item in value.items()]
    return repr(value)


def rewrite(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested plain data with `change` applied to every leaf (a leaf that does not change is returned itself)."""
    if isinstance(value, (tuple, list)):
        return type(value)(rewrite(item, change) for item in value)
    if isinstance(value, dict):
        return {key: rewrite(item, change) for key, item in value.items()}
    return change(value)


Call = TypeVar("Call")


def with_refs(call: Call, change: Callable[[Ref], Ref], **fields: Any) -> Call:
    """An operator or instruction with `change` applied to every value in its arguments, and with other `fields`."""
    new = lambda leaf: change(leaf) if isinstance(leaf, Ref) else leaf  # noqa: E731
    given: Any = call
    changed: Call = replace(given, args=rewrite(given.args, new), kwargs=rewrite(given.kwargs, new), **fields)
    return changed


def fresh(name: str, taken: set[str]) -> str:
    """`name`, with underscores appended until it is not `taken`; then it is."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name
