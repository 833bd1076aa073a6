"""What a loss over tokens divides by: the elements of a batch entry that count, such as labels other than -100.

Micro-batches of one step hold different numbers of them. The step's loss is the mean over the tokens of all its
micro-batches, as one device would compute it, so each of them counts by its share of the tokens and not as one of so
many: all of its loss where that is the mean alone (`counted`), or each of its means by its own share (`each_counted`).
The invariant: what is counted is what the class loss of the graph divides by, found in the graph itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.build.divisors import MEAN, values
from runner.data.loader import Block
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, rewrite
from strategies.rules.random import draws
from strategies.rules.registry import arguments, resolve

CLASS_LOSSES = frozenset({"cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"})
MOVES = frozenset(
    "_to_copy _unsafe_view alias clone constant_pad_nd contiguous detach flatten movedim pad permute reshape select "
    "slice squeeze to transpose unsqueeze view".split()
)
"""Operators that move elements and change none."""
FIRST = 1 << 40
"""Marks of elements are no less than this, and no class is as large."""


@dataclass(frozen=True)
class Counted:
    """The elements of batch entry number `entry` that a loss counts.

    Attributes:
        entry: the position of the entry in a batch.
        times: how often the loss looks at each element of a row (a model may leave out the first); float64.
        ignored: the value of elements that do not count.
        weight: what a class counts, by class; None: 1.
    """

    entry: int
    times: Tensor
    ignored: int
    weight: Tensor | None

    def same(self, other: Counted) -> bool:
        """Whether both count the same elements."""
        weights = [one.weight for one in (self, other) if one.weight is not None]
        return (
            (self.entry, self.ignored) == (other.entry, other.ignored)
            and torch.equal(self.times, other.times)
            and (not weights or (len(weights) == 2 and torch.equal(*weights)))
        )

    def of(self, entries: Sequence[Tensor], block: Block) -> float:
        """What the elements in this block of the micro-batch count together."""
        found = values(entries[self.entry].cpu(), self.ignored, self.weight)
        return float((found * self.times[tuple(slice(*span) for span in block[1:])]).sum())


def mean_weights(weights: Sequence[float], precision: str, device: torch.device | str = "cpu") -> list[Tensor]:
    """The weights of means over classes as inputs of a step in this `train.precision`."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return [torch.tensor(weight, dtype=dtype, device=device) for weight in weights]


def counted(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> Counted | None:
    """What the loss of a training graph counts, None where that is not the same for all of its means: without a mean
    over classes, with several that count differently, or where classes are computed."""
    means = [one for operator, one in _means(graph, tensors) if operator.id in graph.returning]
    first = means[0] if means else None
    return first if first is not None and all(one is not None and one.same(first) for one in means[1:]) else None


def each_counted(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> tuple[Counted | None, ...]:
    """What each mean over classes of a training graph counts, in the order in which they are computed: None where that
    is unknown. Nothing where no means are known, or all of the loss is a mean of what `counted` says."""
    means = _means(graph, tensors)
    trained = {operator.id for operator, _ in means if operator.id in graph.returning}
    alone = counted(graph, tensors) is not None and not _mixed(graph, trained)
    each = tuple(one if operator.id in trained else None for operator, one in means)
    return () if alone or not any(each) else each


def _means(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> list[tuple[Operator, Counted | None]]:
    """The means over classes, in order, with what they count, if that is known."""
    losses = [operator for operator in graph.operators if operator.op in CLASS_LOSSES]
    given = [(operator, arguments(operator)) for operator in losses]
    return [(one, _counted(graph, tensors, own)) for one, own in given if own["reduction"] == MEAN]


def _counted(graph: OperatorGraph, tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> Counted | None:
    target, ignored, weight = given["target"], given["ignore_index"], None
    if given["weight"] is not None and (weight := _constant(graph, tensors, given["weight"])) is None:
        return None
    source, moves = _origin(graph, target)
    if source is None or graph.specs[target].dtype not in ("int64", "int32"):  # of probabilities each prediction counts
        return None
    times = _times(source, target, moves, ignored)
    if times is None:
        return None
    names = [one.name for one in graph.sources if one.kind == "input"]
    return Counted(names.index(source.name), times, ignored, weight)


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
    behind, waiting, written = set[str](), [ref.id], dict(graph.updates)
    while waiting:
        node = graph.by_id[waiting.pop()]
        if node.id in behind:
            continue
        behind.add(node.id)
        if isinstance(node, Operator):
            if draws(node):
                return None
            waiting += [operand.id for operand in node.operands]
        elif node.kind == "input" or node.trainable or node.id in written or tensors[node.name].is_meta:
            return None
    values: dict[str, Any] = {
        source.id: (tensors[source.name].detach().cpu().clone(),) for source in graph.sources if source.id in behind
    }

    def value(leaf: Any) -> Any:
        return values[leaf.id][leaf.index] if isinstance(leaf, Ref) else leaf

    for operator in graph.operators:
        if operator.id in behind:
            args, kwargs = rewrite((operator.args, operator.keywords), value)
            results = resolve(operator.target)(*args, **kwargs)
            values[operator.id] = (results,) if isinstance(results, Tensor) else results
    found: Tensor = values[ref.id][ref.index]
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
    moved: dict[Ref, Tensor] = {Ref(source.id): torch.arange(FIRST, FIRST + elements).view(source.spec.shape)}

    def value(leaf: Any) -> Any:
        return moved[leaf] if isinstance(leaf, Ref) else leaf

    for operator in moves:
        args, kwargs = rewrite((operator.args, operator.keywords), value)
        moved[Ref(operator.id)] = resolve(operator.target)(*args, **kwargs)
    reached = moved[target].flatten()
    marks = reached[reached >= FIRST] - FIRST
    times = torch.bincount(marks, minlength=elements).view(source.spec.shape).double()
    constant = bool((reached[reached < FIRST] != ignored).any())
    return None if constant or not source.spec.shape or not torch.equal(times, times[:1].expand_as(times)) else times[0]
