"""What a loss over tokens divides by: the elements of a batch entry that count, such as labels other than -100.

Micro-batches of one step hold different numbers of them. The step's loss is the mean over the tokens of all its
micro-batches, as one device would compute it, so each of them counts by its share of the tokens and not as one of so
many: all of its loss where that is the mean alone (`counted`), or each of its means by its own share (`each_counted`).
The invariant: the counted elements are those by which the loss of the graph divides, found in the graph itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.build.divisors import MEAN, values
from runner.data.loader import Block
from strategies.core.errors import StrategyError
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, rewrite
from strategies.rules.random import draws
from strategies.rules.registry import arguments, resolve
from strategies.rules.table import EVEN, PADDED
from strategies.runtime.tensor_files import StoredTensor, TensorReader

CLASS_LOSSES = frozenset({"cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"})
MOVES = frozenset(
    "_to_copy _unsafe_view alias clone constant_pad_nd contiguous detach expand flatten movedim pad permute reshape "
    "select slice squeeze to transpose unsqueeze view".split()
)
"""Operators that move elements and change none."""
ELEMENTWISE = frozenset(
    name for line, names in (*PADDED, *EVEN) if line == "...* -> ..." for name in ("to", *names.split())
)
NOTHING = torch.empty(0, dtype=torch.float64)
DIVISIONS = frozenset({"div", "divide", "true_divide"})
OVER_DIMS = frozenset("all amax amin any argmax argmin count_nonzero cumsum mean prod sum".split())
PRODUCTS = frozenset({"mul", "multiply"})
INVERSES = frozenset({"pow", "reciprocal", "rsqrt"})
ADDITIVE = MOVES | frozenset("add masked_fill nan_to_num neg negative positive rsub sub subtract where".split())
"""Operators on scalars that a loss may compute from a mean and stay a sum of means."""
FILLING = frozenset({"full", "ones", "zeros"})
SUMMED = frozenset({"sum", "count_nonzero"})
FIRST = 1 << 40
"""Marks of elements are no less than this, and no class is as large."""


@dataclass(frozen=True)
class RowwiseValues:
    """Values that a forward computes from entries of a batch row by row, such as labels behind a mask, or the mask.

    Attributes:
        rows: of the micro-batch that was captured.
        entries: by id of a source, the position of the entry in a batch.
        constants: by id of a source, a tensor that is the same in every step.
        operators: compute them, in order.
        target: the values, rows outermost.
        by_element: whether each follows from the same element of all entries, so that parts of rows have theirs.
    """

    rows: int
    entries: Mapping[str, int]
    constants: Mapping[str, Tensor]
    operators: tuple[Operator, ...]
    target: Ref
    by_element: bool = False

    def readable(self, layouts: Sequence[Sequence[tuple[str, ...]]]) -> bool:
        """Whether ranks can compute those of their blocks, where these are the axes that slice each dim of each entry:
        of complete rows, or of any equal slices by element."""
        sliced = [tuple(layouts[position]) for position in self.entries.values()]
        complete = not any(any(dims[1:]) for dims in sliced)
        return len({dims[0] for dims in sliced}) == 1 and (complete or (self.by_element and len({*sliced}) == 1))

    def of(self, batch: Sequence[Tensor]) -> Tensor:
        """The values [rows, values of a row] for any number of rows."""
        own = {id: batch[position].cpu() for id, position in self.entries.items()}
        count = len(next(iter(own.values())))
        parts = []
        for first in range(0, count, self.rows):
            rows = torch.arange(first, first + self.rows).clamp(max=count - 1)  # as many as were captured
            values = {Ref(id): entry[rows] for id, entry in own.items()}
            found = _run(self.operators, values | {Ref(id): one for id, one in self.constants.items()})
            parts.append(found[self.target].reshape(self.rows, -1)[: count - first])
        return torch.cat(parts)


@dataclass(frozen=True)
class Divisor:
    """A number that the batch decides, by which a scalar of the loss is divided: a function of a sum over rows.

    Attributes:
        computed: the summands.
        nonzero: whether those other than zero are counted instead.
        total: the sum.
        operators: compute `divisor` from it, in order.
        divisor: the number.
        integer: whether the sum is one, which a number of Python makes one of the default dtype.
    """

    computed: RowwiseValues
    nonzero: bool
    total: Ref
    operators: tuple[Operator, ...]
    divisor: Ref
    integer: bool = False

    @property
    def entry(self) -> int:
        """One of the entries."""
        return min(self.entries)

    @property
    def entries(self) -> frozenset[int]:
        """All entries that are needed."""
        return frozenset(self.computed.entries.values())

    def readable(self, layouts: Sequence[Sequence[tuple[str, ...]]]) -> bool:
        """As for `Counted`."""
        return self.computed.readable(layouts)

    def of(self, entries: Sequence[Tensor], block: Block) -> float:
        """The sum over a block of rows."""
        found = self.computed.of(entries)
        return float((found != 0 if self.nonzero else found).double().sum())

    def value(self, total: float) -> float:
        """The number for a sum over all rows."""
        sum = torch.tensor(round(total)) if self.integer else torch.tensor(total, dtype=torch.float64)
        return float(_run(self.operators, {self.total: sum})[self.divisor])


@dataclass(frozen=True)
class Counted:
    """The elements of batch entry number `entry` that a loss counts.

    Attributes:
        entry: the position of the entry in a batch.
        times: how often the loss looks at each element of a row (a model may leave out the first); float64.
        ignored: the value of elements that do not count.
        weight: what a class counts, by class; None: 1.
        computed: the classes in place of the entry's elements, where that is only the first of which they are computed.
    """

    entry: int
    times: Tensor
    ignored: int
    weight: Tensor | None
    computed: RowwiseValues | None = None

    @property
    def entries(self) -> frozenset[int]:
        """All entries that are needed."""
        return frozenset([self.entry] if self.computed is None else self.computed.entries.values())

    def readable(self, layouts: Sequence[Sequence[tuple[str, ...]]]) -> bool:
        """Whether ranks can count in their blocks, where these are the axes that slice each dim of each entry."""
        return self.computed is None or self.computed.readable(layouts)

    def value(self, total: float) -> float:
        """What a mean divides by, where the elements of a batch count `total`."""
        return total

    def same(self, other: Counted) -> bool:
        """Whether both count the same elements."""
        weights = [one.weight for one in (self, other) if one.weight is not None]
        return (
            (self.entry, self.ignored) == (other.entry, other.ignored)
            and torch.equal(self.times, other.times)
            and (None if self.computed is None else self.computed.target)
            == (None if other.computed is None else other.computed.target)
            and (not weights or (len(weights) == 2 and torch.equal(*weights)))
        )

    def of(self, entries: Sequence[Tensor], block: Block) -> float:
        """What the elements in this block of the micro-batch count together; of computed classes a block of rows."""
        if self.computed is not None:
            return float(values(self.computed.of(entries), self.ignored, self.weight).sum())
        found = values(entries[self.entry].cpu(), self.ignored, self.weight)
        return float((found * self.times[tuple(slice(*span) for span in block[1:])]).sum())


@dataclass(frozen=True)
class AddedRows:
    """A loss that adds up its rows: that of a batch is the sum of those of its micro-batches."""

    entries: frozenset[int] = frozenset()

    def readable(self, layouts: Sequence[Sequence[tuple[str, ...]]]) -> bool:
        """Nothing is counted."""
        return True


class InitialTensors(Mapping[str, Tensor]):
    """The values with which training begins: those in files before those with which the model is `made`."""

    def __init__(self, made: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
        self._made, self._stored, self._reader = made, stored, TensorReader()

    def __getitem__(self, name: str) -> Tensor:
        made = self._made[name]
        return self._reader.block(self._stored[name]).to(made.dtype) if name in self._stored else made

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def shares(counts: Sequence[float], mean: Counted | Divisor) -> list[float]:
    """The share of each micro-batch in the mean of all, where their elements count so much."""
    total = mean.value(sum(counts))
    return [mean.value(count) / total for count in counts] if total else [1 / len(counts)] * len(counts)


def mean_weights(weights: Sequence[float], precision: str, device: torch.device | str = "cpu") -> list[Tensor]:
    """The weights of means over classes as inputs of a step in this `train.precision`."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return [torch.tensor(weight, dtype=dtype, device=device) for weight in weights]


def counted(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> Counted | Divisor | None:
    """What the loss of a training graph counts, None where that is not the same for all of its means: without a mean
    over classes or one that is written out and is all of it, with several that count differently, or where classes do
    not follow from the batch row by row."""
    means = [one for operator, one in _means(graph, tensors) if operator.id in graph.returning]
    written = [one for one in divisions(graph) if one.id in graph.returning]
    if not means and len(written) == 1 and not _mixed(graph, {written[0].id}) and not nonlinear_in_means(graph):
        return _divisor(graph, tensors, written[0].args[1])
    first = means[0] if means else None
    return first if first is not None and all(one is not None and one.same(first) for one in means[1:]) else None


def each_counted(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> tuple[Counted | Divisor | None, ...]:
    """What each mean of a training graph counts, in the order in which they are computed: None where that is unknown
    or the loss is not linear in it. Nothing where no means are known, or all of the loss is a mean of what `counted`
    says."""
    means = _means(graph, tensors)
    written = {one.id: _divisor(graph, tensors, one.args[1]) for one in divisions(graph)}
    trained = {operator.id for operator, _ in means if operator.id in graph.returning}
    alone = counted(graph, tensors) is not None and not _mixed(graph, trained)
    found: dict[str, Counted | Divisor | None] = {one.id: count if one.id in trained else None for one, count in means}
    found |= written
    found |= dict.fromkeys(_scalars_behind(graph, nonlinear_in_means(graph)) & found.keys())
    each = tuple(found[operator.id] for operator in graph.operators if operator.id in found)
    return () if (alone and not any(written.values())) or not any(each) else each


def check_weighed(weighed: OperatorGraph, graph: OperatorGraph, weights: Sequence[str]) -> None:
    """Check that each of the `weights`, inputs of a `weighed` graph, multiplies the mean of the same position of
    `each_counted` for the `graph` without them. Raises StrategyError for another one: a graph knows divisions by a
    number of Python, and a forward those by constants and those whose result is not used."""
    found = {operator.id for operator in (*_class_means(graph), *divisions(graph))}
    means = [operator for operator in graph.operators if operator.id in found]
    inputs, names = {source.name: Ref(source.id) for source in weighed.of_kind("input")}, {one.name for one in means}
    for mean, weight in zip(means, weights, strict=True):
        products = [user for user, _ in weighed.users.get(inputs[weight], ()) if user.op in PRODUCTS]
        ref = next((one for user in products for one in user.operands if one != inputs[weight]), None)
        while ref is not None and isinstance(node := weighed.by_id[ref.id], Operator) and node.name not in names:
            ref = node.operands[0] if len(node.operands) == 1 else None
        if ref is None or weighed.by_id[ref.id].name != mean.name:
            raise StrategyError("MW901", f"the mean at {mean.where} is not the one that its weight multiplies")


def divisions(graph: OperatorGraph) -> list[Operator]:
    """The scalars with a gradient that are divided by a scalar without one, as a mean that is written out."""
    return [
        operator
        for operator in graph.operators
        if operator.op in DIVISIONS
        and isinstance(operator.args[1], Ref)
        and not any(graph.specs[ref].shape for ref in operator.operands)
        and isinstance(operator.args[0], Ref)
        and operator.args[0] in graph.trained
        and operator.args[1] not in graph.trained
    ]


def unknown_labels(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> Operator | None:
    """The first mean over classes whose labels the batch decides, but not row by row."""
    entries = {source.id for source in graph.of_kind("input")}
    for operator, known in _means(graph, tensors):
        target = arguments(operator)["target"]
        if known is None and operator.id in graph.returning and not graph.specs[target].floating:
            if not entries.isdisjoint(dependencies(graph, target)):
                return operator
    return None


def unknown_division(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> Operator | None:
    """The first division on the way to the loss by a number that the batch decides in a way that is not known, or
    product with the inverse of one."""
    entries = {source.id for source in graph.of_kind("input")}
    divided = {operator.id for operator in divisions(graph)}
    for operator in graph.operators:
        if operator.id not in graph.returning:
            continue
        if operator.id in divided:
            by = operator.args[1]
            if not entries.isdisjoint(dependencies(graph, by)) and _divisor(graph, tensors, by) is None:
                return operator
        if operator.op in PRODUCTS:
            for ref in operator.operands:
                if (
                    ref not in graph.trained
                    and _inverts(graph, ref)
                    and not entries.isdisjoint(dependencies(graph, ref))
                ):
                    return operator
        if operator.op in DIVISIONS and graph.specs[Ref(operator.id)].shape:  # losses, before they are added up
            by = operator.args[1]
            if _is_untrained_scalar(graph, by) and not entries.isdisjoint(dependencies(graph, by)):
                return operator
            if isinstance(by, Ref) and by not in graph.trained and _adds_rows(graph, by):
                return operator
    return None


def _adds_rows(graph: OperatorGraph, value: Ref) -> bool:
    """Whether a tensor holds sums over all rows of the batch, such as those of the labels of each class."""
    rows = {source.spec.shape[0] for source in graph.of_kind("input") if source.spec.shape}
    for operator in (graph.by_id[id] for id in dependencies(graph, value)):
        if isinstance(operator, Operator) and operator.op in SUMMED | {"mean"}:
            before, after = (graph.specs[ref].shape[:1] for ref in (operator.operands[0], Ref(operator.id)))
            if rows.issuperset(before) and before and before != after:
                return True
    return False


def _is_untrained_scalar(graph: OperatorGraph, value: Any) -> bool:
    return isinstance(value, Ref) and value not in graph.trained and not graph.specs[value].shape


def _inverts(graph: OperatorGraph, ref: Ref) -> bool:
    """Whether a scalar is computed by a division, or a tensor by one by a scalar."""
    scalar = not graph.specs[ref].shape
    while isinstance(node := graph.by_id[ref.id], Operator) and len(node.operands) == 1:
        if scalar and node.op in INVERSES:
            return True
        (ref,) = node.operands
    return isinstance(node, Operator) and node.op in DIVISIONS and (scalar or _is_untrained_scalar(graph, node.args[1]))


def nonlinear_in_means(graph: OperatorGraph) -> list[Operator]:
    """The operators between scalars that make the loss of a batch no mean of those of its rows, in order: functions of
    a mean, products and quotients of two."""
    decided = {Ref(source.id) for source in graph.of_kind("input")}  # values that follow from the batch
    for operator in graph.operators:
        if not decided.isdisjoint(operator.operands):
            decided |= {Ref(operator.id, index) for index in range(len(operator.results))}
    found = []
    for id in _scalars_behind(graph, graph.outputs):
        node = graph.by_id[id]
        if not isinstance(node, Operator) or node.op not in (ELEMENTWISE | DIVISIONS) - ADDITIVE:
            continue
        means = [ref for ref in node.operands if ref in graph.trained and ref in decided]
        scaled = node.op in PRODUCTS or (node.op in DIVISIONS and node.args[0] in means)
        if means and not (scaled and len(means) == 1) and not any(graph.specs[ref].shape for ref in node.operands):
            found.append(node)
    return sorted(found, key=graph.operators.index)


def _scalars_behind(graph: OperatorGraph, waiting: Iterable[Ref | Operator]) -> set[str]:
    """The ids of the scalars through which a gradient comes back from these to tensors with dims."""
    left, seen = [one.id for one in waiting], set[str]()
    while left:
        id = left.pop()
        if id not in seen and id in graph.returning and not graph.specs[Ref(id)].shape:
            seen.add(id)
            left += [ref.id for ref in graph.by_id[id].operands]  # type: ignore[union-attr]
    return seen


def _divisor(graph: OperatorGraph, tensors: Mapping[str, Tensor], by: Ref) -> Divisor | None:
    """How the batch decides a number; None if it is no function of a sum over rows."""
    inputs, chain, ref = {one.id for one in graph.of_kind("input")}, list[Operator](), by
    while isinstance(node := graph.by_id[ref.id], Operator) and not graph.specs[ref].shape:
        if node.op in SUMMED:
            (first, *_) = node.operands
            computed = _computed(graph, tensors, first)
            if computed is None:
                return None
            return Divisor(computed, node.op != "sum", ref, tuple(chain[::-1]), by, not graph.specs[ref].floating)
        below = [one for one in node.operands if not inputs.isdisjoint(dependencies(graph, one))]
        if node.op not in ELEMENTWISE | MOVES or len({*node.operands}) != 1 or len(below) != 1:
            return None
        if node.op not in MOVES | PRODUCTS | DIVISIONS and any(_may_be_a_size(graph, node, one) for one in node.args):
            return None
        chain.append(node)
        ref = below[0]
    return None


def _may_be_a_size(graph: OperatorGraph, operator: Operator, number: Any) -> bool:
    """Whether a number of Python may be a size of the batch that was captured, as in `mask.sum() - len(mask)`, and so
    another one in other batches; not one below 1, as in `mask.sum() + 1e-8`, nor 1 where there are several rows, or as
    a bound (`clamp(min=1)`)."""
    if not isinstance(number, int | float) or abs(number) < 1:
        return False
    several = all(source.spec.shape[:1] > (1,) for source in graph.of_kind("input"))
    return abs(number) > 1 or not (several or operator.op.startswith("clamp"))


def _means(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> list[tuple[Operator, Counted | None]]:
    """The means over classes, in order, with what they count, if that is known."""
    return [(one, _counted(graph, tensors, arguments(one))) for one in _class_means(graph)]


def _class_means(graph: OperatorGraph) -> list[Operator]:
    losses = [operator for operator in graph.operators if operator.op in CLASS_LOSSES]
    return [operator for operator in losses if arguments(operator)["reduction"] == MEAN]


def _counted(graph: OperatorGraph, tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> Counted | None:
    target, ignored, weight = given["target"], given["ignore_index"], None
    if given["weight"] is not None and (weight := _constant(graph, tensors, given["weight"])) is None:
        return None
    if graph.specs[target].dtype not in ("int64", "int32"):  # of probabilities each prediction counts
        return None
    source, moves = _origin(graph, target)
    times = None if source is None else _times(source, target, moves, ignored)
    if source is not None and times is not None:
        names = [one.name for one in graph.sources if one.kind == "input"]
        return Counted(names.index(source.name), times, ignored, weight)
    computed = _computed(graph, tensors, target)
    return None if computed is None else Counted(min(computed.entries.values()), NOTHING, ignored, weight, computed)


def _computed(graph: OperatorGraph, tensors: Mapping[str, Tensor], target: Ref) -> RowwiseValues | None:
    """How `target` is computed row by row from entries of the batch; None if it is not."""
    inputs = {one.id: position for position, one in enumerate(graph.of_kind("input"))}
    behind = dependencies(graph, target)
    entries = {id: inputs[id] for id in behind if id in inputs}
    if not entries:
        return None
    by_row = {Ref(id) for id in entries}
    rows = graph.specs[next(iter(by_row))].shape[0]
    if any(graph.specs[ref].shape[:1] != (rows,) for ref in by_row):
        return None
    constants = {}
    for source in graph.sources:
        if source.id in behind and source.id not in inputs:
            if not _unchanged(graph, tensors, source):
                return None
            constants[source.id] = tensors[source.name].detach().cpu().clone()
    operators = tuple(operator for operator in graph.operators if operator.id in behind)
    for operator in operators:
        if draws(operator) or len(operator.results) != 1:
            return None
        if by_row.isdisjoint(operator.operands):
            continue
        if not any(
            known(graph, operator, rows)
            for known in (
                partial(_elementwise, by_row=by_row),
                partial(_looks_up, by_row=by_row),
                _keeps_rows,
                _reduces_each_row,
            )
        ):
            return None
        by_row.add(Ref(operator.id))
    if target not in by_row:
        return None
    shapes = {graph.specs[ref].shape for ref in by_row}
    reading = [operator for operator in operators if not by_row.isdisjoint(operator.operands)]
    by_element = len(shapes) == 1 and all(
        operator.op in ELEMENTWISE and all(ref in by_row or not graph.specs[ref].shape for ref in operator.operands)
        for operator in reading
    )
    return RowwiseValues(rows, entries, constants, operators, target, by_element)


def _elementwise(graph: OperatorGraph, operator: Operator, rows: int, by_row: Collection[Ref]) -> bool:
    """Whether a row of the result follows from that row of the operands `by_row`; the others are the same for all."""
    shape = operator.results[0].shape
    shapes = {ref: graph.specs[ref].shape for ref in operator.operands}
    return (
        operator.op in ELEMENTWISE
        and shape[:1] != ()
        and shape[0] % rows == 0
        and all(
            (len(own) == len(shape) and own[:1] == shape[:1])
            if ref in by_row
            else len(own) < len(shape) or own[:1] == (1,) or _is_filled(graph, ref)
            for ref, own in shapes.items()
        )
    )


def _is_filled(graph: OperatorGraph, ref: Ref) -> bool:
    """Whether all elements of a tensor are one number."""
    node = graph.by_id[ref.id]
    return isinstance(node, Operator) and node.op in FILLING and not node.operands


def _looks_up(graph: OperatorGraph, operator: Operator, rows: int, by_row: Collection[Ref]) -> bool:
    """Whether an operator takes rows of a table, the same for all, by indices `by_row`."""
    if operator.op not in ("embedding", "index"):
        return False
    given = arguments(operator)
    table, indices = (given["weight"], given["indices"]) if operator.op == "embedding" else operator.args[:2]
    places = [indices] if isinstance(indices, Ref) else [*indices]
    return table not in by_row and len(places) == 1 and graph.specs[places[0]].dtype in ("int64", "int32")


def _reduces_each_row(graph: OperatorGraph, operator: Operator, rows: int) -> bool:
    """Whether an operator reduces, or runs along, dims of its operand that are no rows."""
    shape = graph.specs[operator.operands[0]].shape
    if operator.op not in OVER_DIMS or shape[:1] != (rows,) or len({*operator.operands}) != 1:
        return False
    dims = arguments(operator).get("dim")
    each = [dims] if isinstance(dims, int) else [*(dims or ())]
    return bool(each) and all(dim % len(shape) for dim in each)


def _keeps_rows(graph: OperatorGraph, operator: Operator, rows: int) -> bool:
    """Whether a move of elements leaves the rows outermost, found by moving marks of the rows."""
    if operator.op not in MOVES or len({*operator.operands}) != 1:
        return False
    spec = graph.specs[operator.operands[0]]
    marks = torch.arange(FIRST, FIRST + rows).repeat_interleave(spec.elements // rows).view(spec.shape)
    moved = _run((operator,), {operator.operands[0]: marks})[Ref(operator.id)]
    if moved.numel() % rows:
        return False
    own = moved.reshape(rows, -1)
    return bool(((own == torch.arange(FIRST, FIRST + rows)[:, None]) | (own < FIRST)).all())


def _mixed(graph: OperatorGraph, means: set[str]) -> bool:
    """Whether something trained comes to the `means` on their way to the loss."""
    behind: set[Ref] = set()
    for operator in graph.operators:
        come = {ref for ref in operator.operands if ref in behind}
        if come and operator.id not in means and any(ref in graph.trained for ref in {*operator.operands} - come):
            return True
        if come or operator.id in means:
            behind |= {Ref(operator.id, index) for index in range(len(operator.results))}
    return False


def _constant(graph: OperatorGraph, tensors: Mapping[str, Tensor], ref: Ref) -> Tensor | None:
    """The value of a tensor that is the same in every step; None for any other."""
    behind = dependencies(graph, ref)
    sources = [source for source in graph.sources if source.id in behind]
    operators = tuple(operator for operator in graph.operators if operator.id in behind)
    if any(map(draws, operators)) or not all(_unchanged(graph, tensors, source) for source in sources):
        return None
    return _run(operators, {Ref(one.id): tensors[one.name].detach().cpu().clone() for one in sources})[ref]


def dependencies(graph: OperatorGraph, ref: Ref) -> set[str]:
    """The ids of everything on which a value depends."""
    behind, waiting = set[str](), [ref.id]
    while waiting:
        node = graph.by_id[waiting.pop()]
        if node.id not in behind:
            behind.add(node.id)
            waiting += [operand.id for operand in node.operands] if isinstance(node, Operator) else []
    return behind


def _unchanged(graph: OperatorGraph, tensors: Mapping[str, Tensor], source: Source) -> bool:
    """Whether a source has the same value in every step, which is known."""
    if source.kind == "input" or source.trainable or source.id in dict(graph.updates):
        return False
    return not tensors[source.name].is_meta


def _run(operators: Sequence[Operator], known: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
    """All values that `operators` compute from known ones."""
    found = dict(known)

    def value(leaf: Any) -> Any:
        return found[leaf] if isinstance(leaf, Ref) else leaf

    for operator in operators:
        args, kwargs = rewrite((operator.args, operator.keywords), value)
        results = resolve(operator.target)(*args, **kwargs)
        each = [results] if isinstance(results, Tensor) else results
        found.update((Ref(operator.id, index), one) for index, one in enumerate(each))
    return found


def _origin(graph: OperatorGraph, target: Ref) -> tuple[Source | None, list[Operator]]:
    """The batch entry of which `target` is a view or copy, and the operators from there in order; None if it is not."""
    moves: list[Operator] = []
    while isinstance(node := graph.by_id[target.id], Operator):
        if node.op not in MOVES or len({*node.operands}) != 1:
            return None, []
        moves.append(node)
        (target,) = {*node.operands}
    return (node if node.kind == "input" else None), moves[::-1]


def _times(source: Source, target: Ref, moves: Sequence[Operator], ignored: int) -> Tensor | None:
    """How often each element of a row reaches `target`: found by moving marks in place of classes. None where rows
    differ, or classes are added."""
    elements = source.spec.elements
    marks = torch.arange(FIRST, FIRST + elements).view(source.spec.shape)
    reached = _run(moves, {Ref(source.id): marks})[target].flatten()
    marks = reached[reached >= FIRST] - FIRST
    times = torch.bincount(marks, minlength=elements).view(source.spec.shape).double()
    constant = bool((reached[reached < FIRST] != ignored).any())
    return None if constant or not source.spec.shape or not torch.equal(times, times[:1].expand_as(times)) else times[0]
