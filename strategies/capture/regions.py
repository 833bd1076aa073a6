"""Regions of a captured graph (no_grad, enable_grad, autocast) become plain operators.

A value computed without gradients passes `detach` where it leaves the region. What autocast does is written out as
casts: which operands it casts is read off a run of the operator on fake tensors under the same autocast, so there is no
table of operators to keep. As in autocast, a parameter is cast once and every other operand at each use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from strategies.capture.nodes import at, call, fakes, floating, inferred, mode_of, op_of, shaped_by_values, values
from strategies.capture.tracing import in_few_words
from strategies.core.errors import StrategyError

aten = torch.ops.aten


@dataclass(frozen=True)
class Autocast:
    """An autocast region, as torch.autocast takes it."""

    device: str
    dtype: torch.dtype
    enabled: bool
    cached: bool
    """Whether casts of parameters are kept; export always switches that off."""


def flatten(graph: fx.Graph, trainable: Callable[[fx.Node], bool]) -> None:
    """Remove the region markers from `graph`, where torch recorded the start and end of each region; `trainable` says
    which placeholders need a gradient.

    Raises StrategyError for an autocast region of another device than the batch's.
    """
    _note(graph)
    _write_casts(graph, trainable)
    _write_detach(graph, trainable)


def _note(graph: fx.Graph) -> None:
    """Let every node know the regions around it, and drop the borders."""
    gradients, around, borders = True, [], []
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            gradients = node.args[0]
        elif node.target is torch.amp.autocast_mode._enter_autocast:
            around.append(Autocast(*node.args))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            around.pop()
        else:
            node.meta["without_grad"] = not gradients and node.op == "call_function"
            node.meta["autocast"] = around[-1] if around else None
            continue
        borders.append(node)
    for node in reversed(borders):
        graph.erase_node(node)


def _write_detach(graph: fx.Graph, trainable: Callable[[fx.Node], bool]) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.meta.get("without_grad") or not floating(node.meta.get("val")) or _shows(node, trainable):
            continue
        outside = [user for user in node.users if not user.meta.get("without_grad")]
        if outside:
            cut = _returned(graph, node)
            if cut is None:
                with graph.inserting_after(node):
                    cut = graph.call_function(aten.detach.default, (node,))
                cut.meta = dict(node.meta)
            for user in outside:
                user.replace_input_with(node, cut)


def _shows(node: fx.Node, trainable: Callable[[fx.Node], bool]) -> bool:
    """Whether a node is a parameter that learns, which operators have written in place."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        written = node.target._schema.arguments[0].alias_info
        above = node.args[0] if node.args and written is not None and written.is_write else None
        if not isinstance(above, fx.Node):
            return False
        node = above
    return node.op == "placeholder" and trainable(node)


def _returned(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The operand that an operator returns as it is, if it does (`x.to(x.dtype)`): export then takes the operator for
    the origin of all that reads the operand afterwards, outside of the region too."""
    same = [one for one in node.all_input_nodes if _same_spec(one.meta.get("val"), node.meta["val"])]
    if not same or not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    with mode_of(graph), torch.no_grad():
        result = node.target(*values(node.args), **values(node.kwargs))
    return next((one for one in same if result is one.meta["val"]), None)


def _same_spec(first: Any, second: Tensor) -> bool:
    return isinstance(first, Tensor) and first.dtype == second.dtype and _sizes(first) == _sizes(second)


def _sizes(tensor: Tensor) -> list[Any]:
    """The sizes of a tensor, of which those that depend on values are equal where they are the same expression."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.shape]


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of the given tensors are cast, and to what; and how often other tensors are."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands = {id(operand) for operand in operands}
        self.casts: dict[int, torch.dtype] = {}
        self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = (kwargs or {}).get("dtype")
        if func is aten._to_copy.default and wanted is not None:
            if id(args[0]) in self.operands:
                self.casts[id(args[0])] = wanted
            else:
                self.others += 1
        return func(*args, **(kwargs or {}))


def _write_casts(graph: fx.Graph, trainable: Callable[[fx.Node], bool]) -> None:
    cached: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
    for node in list(graph.nodes):
        region: Autocast | None = node.meta.get("autocast")
        if region is None or not region.enabled or not _casts(node):
            continue
        operands = [fake for fake in fakes(values((node.args, node.kwargs))) if fake.is_floating_point()]
        if any(operand.device.type != region.device for operand in operands):
            raise StrategyError(
                "MW905",
                f"torch.autocast({region.device!r}) around {op_of(node)}{at(node)} is of another device than the "
                f"tensors in it; take that of the batch: torch.autocast(x.device.type, {region.dtype}).",
            )
        dtypes = _dtypes(graph, node, region, operands)

        def cast(operand: fx.Node, node: fx.Node = node, region: Autocast = region, dtypes: Any = dtypes) -> fx.Node:
            dtype = dtypes.get(id(operand.meta["val"]))
            if dtype is None or dtype == operand.meta["val"].dtype:
                return operand
            key = (operand, dtype, bool(node.meta.get("without_grad")))
            once = operand.op == "placeholder" and trainable(operand)
            if not once or key not in cached:
                with graph.inserting_before(node):
                    fresh = call(graph, node, aten.to.dtype, operand, dtype)
                if not once:
                    return fresh
                cached[key] = fresh
            return cached[key]

        node.args, node.kwargs = fx.map_arg(node.args, cast), fx.map_arg(node.kwargs, cast)
        if set(dtypes.values()) == {torch.float32}:
            _cast_results(graph, node)


def _cast_results(graph: fx.Graph, node: fx.Node) -> None:
    """Cast the results of a node that computes in fp32 instead of under autocast to the dtypes recorded."""
    recorded = node.meta["val"]
    value = inferred(graph, node.target, node.args, node.kwargs)
    if [fake.dtype for fake in fakes(value)] == [fake.dtype for fake in fakes(recorded)]:
        return
    for result in [node] if isinstance(value, Tensor) else list(node.users):
        wanted = result.meta["val"].dtype
        result.meta["val"] = value if result is node else value[result.args[1]]
        if result.meta["val"].dtype != wanted:
            others = list(result.users)
            with graph.inserting_after(result):
                cast = call(graph, result, aten.to.dtype, result, wanted)
            for user in others:
                user.replace_input_with(result, cast)
    node.meta["val"] = value


def _casts(node: fx.Node) -> bool:
    """Whether autocast may cast the operands of a node. One that is shaped by values is refused later, by itself."""
    known = (
        not shaped_by_values(node)
        and isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
    )
    return known and op_of(node) not in ("to", "_to_copy", "_assert_tensor_metadata", "item")


def _dtypes(graph: fx.Graph, node: fx.Node, region: Autocast, operands: Sequence[Tensor]) -> dict[int, torch.dtype]:
    """What autocast casts each operand to, by the id of its value. What it casts inside of an operator no cast of the
    operands stands for, as in gated recurrent layers on a CPU: that one computes in fp32."""
    args, kwargs = values(node.args), values(node.kwargs)
    with mode_of(graph), torch.no_grad():
        with torch.autocast(region.device, region.dtype, cache_enabled=False), _Seen(operands) as seen:
            node.target(*args, **kwargs)  # type: ignore[operator]
        for casts in (seen.casts, {id(operand): region.dtype for operand in operands}):
            replace = lambda value, casts=casts: value.to(casts[id(value)]) if id(value) in casts else value  # noqa: E731
            changed = tree_map_only(Tensor, replace, (args, kwargs))
            try:
                with in_few_words(), _Seen(()) as plain:
                    result = node.target(*changed[0], **changed[1])  # type: ignore[operator]
            except RuntimeError:
                # A cast that was seen is the operator's own, which it does not take from outside: attention computes
                # a mask in bf16 with queries in fp32.
                continue
            recorded = [fake.dtype for fake in fakes(node.meta["val"])]
            inside = plain.others == seen.others or (casts is not seen.casts and recorded[0] == region.dtype)
            if inside and [fake.dtype for fake in fakes(result)] == recorded:
                return casts
    return {id(operand): torch.float32 for operand in operands}
