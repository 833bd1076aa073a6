"""`as_strided`, which reads memory by strides, replaced by views that mean the same in every layout.

Strides are those of the memory of one device. A slice has others, and so has a permuted tensor after a collective: the
same numbers would reach other elements. Dims of the result that are dims of the operand stay. The other dims are
windows of a single dim, into which the remaining dims of the operand merge: one `unfold` each, whose backward adds
overlapping windows. Invariant: every element of the result is the element of the operand at the same address; what
reads memory that the operand does not show, or shows twice, stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from strategies.capture.nodes import call
from strategies.rules.registry import named

aten = torch.ops.aten
Step = tuple[Any, tuple[Any, ...]]
"""A view of one tensor, and its arguments after it."""


@dataclass(frozen=True)
class Axis:
    """A dim of a tensor in memory; the stride in elements."""

    dim: int
    size: int
    stride: int


def replace_strides(graph: fx.Graph) -> None:
    """Replace every as_strided in `graph`, in place, whose result is windows of its operand."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        given = named(str(node.target), node.args, dict(node.kwargs))
        view, operand = given["self"], given["self"].meta["val"]
        offset = given.get("storage_offset")
        skipped = 0 if offset is None else offset - operand.storage_offset()
        steps = windows(axes(operand.shape, operand.stride()), axes(given["size"], given["stride"]), skipped)
        if steps is None:
            continue
        with graph.inserting_before(node):
            for target, args in steps:
                after = call(graph, node, target, view, *args)
                if _memory(after) == _memory(view):
                    graph.erase_node(after)
                else:
                    view = after
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _memory(node: fx.Node) -> tuple[object, ...]:
    """The addresses of a tensor's elements."""
    value = node.meta["val"]
    return value.shape, value.stride(), value.storage_offset()


def axes(sizes: Sequence[int], strides: Sequence[int]) -> list[Axis]:
    """The axes of a tensor with these sizes and strides, in the order of its dims."""
    return [Axis(dim, size, stride) for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True))]


def windows(own: Sequence[Axis], wanted: Sequence[Axis], skipped: int = 0) -> list[Step] | None:
    """The views that take a tensor with the axes `own` to one with the axes `wanted` of the same memory, from the
    element `skipped` on; None if there are none."""
    if not all(axis.size for axis in (*own, *wanted)) or not _apart(own):
        return None
    same: list[tuple[Axis, Axis]] = []
    for axis in _by_stride(wanted):
        taken = {one.dim for one, _ in same}
        equal = [one for one in own if (one.size, one.stride) == (axis.size, axis.stride) and one.dim not in taken]
        same += [(one, axis) for one in equal[:1]]
    for count in range(len(same), -1, -1):
        if (steps := _steps(own, wanted, skipped, same[:count])) is not None:
            return steps
    return None


def _by_stride(some: Sequence[Axis]) -> list[Axis]:
    """The axes with more than one element, the largest stride first."""
    return sorted((axis for axis in some if axis.size > 1), key=attrgetter("stride"), reverse=True)


def _apart(own: Sequence[Axis]) -> bool:
    """Whether no two elements have the same address."""
    span = 0
    for axis in reversed(_by_stride(own)):
        if axis.stride <= span:
            return False
        span += (axis.size - 1) * axis.stride
    return True


def _steps(
    own: Sequence[Axis], wanted: Sequence[Axis], skipped: int, same: Sequence[tuple[Axis, Axis]]
) -> list[Step] | None:
    """The views that `windows` returns, with the pairs of axes in `same` unchanged."""
    result = {mine: theirs.dim for mine, theirs in same}
    merged = [axis for axis in own if axis not in result]
    row, others = _by_stride(merged), _by_stride([axis for axis in wanted if axis.dim not in result.values()])
    unit, length = row[-1].stride if row else 1, math.prod(axis.size for axis in row)
    dense = all(outer.stride == inner.size * inner.stride for outer, inner in pairwise(row))
    moves = [skipped, *(axis.stride for axis in others)]
    start, *paces = (move // unit for move in moves)
    span = sum((axis.size - 1) * pace for axis, pace in zip(others, paces, strict=True)) + 1
    if not dense or any(move % unit for move in moves) or start < 0 or start + span > length or 0 in paces:
        return None
    first = min((axis.dim for axis in merged), default=len(own))
    before = [axis for axis in own if axis in result and axis.dim < first]
    after = [axis for axis in own if axis in result and axis.dim > first]
    order = [*before, *sorted(merged, key=attrgetter("stride"), reverse=True), *after]
    dim, shape = len(before), (*(a.size for a in before), length, *(a.size for a in after))
    steps: list[Step] = [
        (aten.permute.default, ([axis.dim for axis in order],)),
        (aten.view.default, (list(shape),)),
        (aten.slice.Tensor, (dim, start, start + span)),
    ]
    reached: list[int | None] = [*(result[axis] for axis in before), None, *(result[axis] for axis in after)]
    for axis, pace in zip(others[:-1], paces, strict=False):
        span -= (axis.size - 1) * pace
        steps.append((aten.unfold.default, (reached.index(None), span, pace)))
        reached = [*(axis.dim if one is None else one for one in reached), None]
    dim = reached.index(None)
    steps.append((aten.slice.Tensor, (dim, 0, span, paces[-1])) if others else (aten.select.int, (dim, 0)))
    left = [others[-1].dim if one is None else one for one in reached if others or one is not None]
    steps.append((aten.permute.default, (sorted(range(len(left)), key=left.__getitem__),)))
    return [*steps, (aten.view.default, ([axis.size for axis in wanted],))]
