"""The way back from a view: a tensor with new contents in the part that a view shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from strategies.capture.nodes import at, call, op_of
from strategies.core.errors import StrategyError
from strategies.rules.traits import traits

aten = torch.ops.aten
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""Sizes by which the dims of a permuted tensor are recognised."""


def put_back(graph: fx.Graph, writer: fx.Node, view: fx.Node, index: Any, base: fx.Node, value: fx.Node) -> fx.Node:
    """`base` with `value` in the part that `view` shows of it (`index`: the number of the view, of several).

    Raises StrategyError if the way back of the view is not known.
    """
    op = op_of(view)
    target: Any = view.target
    shape, own = base.meta["val"].shape, value.meta["val"].shape
    args: Any = view.args[1:]
    kwargs: Any = dict(view.kwargs)
    make: Callable[..., fx.Node] = lambda target, *args, **kwargs: call(graph, writer, target, *args, **kwargs)  # noqa: E731
    if base.meta["val"].is_complex() and op in ("select", "slice"):  # whose scatter has no complex derivative
        dim = args[0] if args else kwargs.pop("dim", 0)
        real = [make(aten.view_as_real.default, part) for part in (base, value)]
        args = (dim if dim >= 0 else dim - 1, *args[1:])
        scatter = aten.select_scatter.default if op == "select" else aten.slice_scatter.default
        return make(aten.view_as_complex.default, make(scatter, *real, *args, **kwargs))
    if op == "select":
        return make(aten.select_scatter.default, base, value, *args, **kwargs)
    if op == "diagonal":
        return make(aten.diagonal_scatter.default, base, value, *args, **kwargs)
    if op == "unbind":
        return make(aten.select_scatter.default, base, value, args[0] if args else kwargs.get("dim", 0), index)
    kind = traits(op).result
    if kind == "split":
        return _part(view, index, base, value, make)
    if op == "view_as_real":
        return make(aten.view_as_complex.default, value)
    if op == "view_as_complex":
        return make(aten.view_as_real.default, value)
    if kind == "permutation":
        labels = torch.empty(PRIMES[: len(shape)], device="meta")
        order = [PRIMES.index(size) for size in target(labels, *args, **kwargs).shape]
        return make(aten.permute.default, value, [order.index(dim) for dim in range(len(order))])
    bits = getattr(target, "_overloadname", "") == "dtype" and op == "view"
    if own == shape and value.meta["val"].dtype == base.meta["val"].dtype and not bits:
        return value  # the view shows all of it
    if op == "slice":
        return make(aten.slice_scatter.default, base, value, *args, **kwargs)
    if op == "narrow":
        dim, start, length = args
        return make(aten.slice_scatter.default, base, value, dim, start, start + length)
    if own.numel() == shape.numel() and not bits and kind in ("reshape", "expansion"):
        return make(aten.reshape.default, value, list(shape))
    raise StrategyError("MW903", f"{op_of(writer)}{at(writer)} writes in place through {op}, which cannot be captured.")


def _part(view: fx.Node, index: int, base: fx.Node, value: fx.Node, make: Callable[..., fx.Node]) -> fx.Node:
    """The way back of one of the parts into which a dim is cut."""
    parts = [tuple(found.shape) for found in view.meta["val"]]
    shape = tuple(base.meta["val"].shape)
    dim = next((d for d, size in enumerate(shape) if parts[0][d] != size), 0)
    start = sum(found[dim] for found in parts[:index])
    if len(parts) == 1:
        return value
    return make(aten.slice_scatter.default, base, value, dim, start, start + parts[index][dim])
