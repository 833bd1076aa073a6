"""Python numbers in a captured graph: those that are known are written in, those that a tensor holds become tensors.

`x.sum().item()` flows on as a tensor of no dims without gradient, in the precision of a python number, and arithmetic
on it becomes torch's. What cannot be done with a tensor (a shape, a branch) is refused with its line. Checks that
export wrote down are dropped: they say what was true at capture.
"""

from __future__ import annotations

import math
import operator as python_operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from strategies.capture.masked import STOPS
from strategies.capture.nodes import COMPARED, at, call, draws, op_of, shaped_by_values
from strategies.core.errors import StrategyError

aten = torch.ops.aten
CHECKS = frozenset(
    "_assert_tensor_metadata _assert_scalar _assert_async _guards_fn sym_constrain_range "
    "sym_constrain_range_for_size promote_types".split()
)
"""Calls that check something, or say a dtype, which is known."""
SIZES = frozenset({"sym_size", "sym_numel", "sym_stride"})
ITEMS = frozenset({"item", "_local_scalar_dense"})
ARITHMETIC: dict[Any, Any] = {
    python_operator.add: aten.add.Tensor,
    python_operator.sub: aten.sub.Tensor,
    python_operator.mul: aten.mul.Tensor,
    python_operator.truediv: aten.div.Tensor,
    python_operator.floordiv: aten.floor_divide.default,
    python_operator.mod: aten.remainder.Tensor,
    python_operator.pow: aten.pow.Tensor_Tensor,
    python_operator.neg: aten.neg.default,
    python_operator.eq: aten.eq.Tensor,
    python_operator.ne: aten.ne.Tensor,
    python_operator.lt: aten.lt.Tensor,
    python_operator.le: aten.le.Tensor,
    python_operator.gt: aten.gt.Tensor,
    python_operator.ge: aten.ge.Tensor,
    python_operator.and_: aten.logical_and.default,
    python_operator.or_: aten.logical_or.default,
    torch.sym_not: aten.logical_not.default,
    torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
    torch.sym_ite: aten.where.self,
    math.trunc: aten.trunc.default,
    math.floor: aten.floor.default,
    math.ceil: aten.ceil.default,
    round: aten.round.default,
}
BOUNDS = {torch.sym_max: "min", torch.sym_min: "max"}
"""The bound of a clamp where one operand is a Python number, so that `max(1, count)` is as known a divisor as
`count.clamp(min=1)`."""
FILLED = {aten.full: 1, aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}
"""Which argument is the number of which a tensor is made."""
PRECISION = {int: torch.int64, float: torch.float64, bool: torch.bool}
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def resolve_numbers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Rewrite `graph` so that every node returns tensors of known shape. Returns what stands for nodes that are gone.
    Raises StrategyError where a number that is only known when the model runs decides over more than values."""
    instead = dict[fx.Node, fx.Node]()
    behind = set[fx.Node]()  # what is computed from tensors whose shapes depend on values
    for node in graph.nodes:
        if shaped_by_values(node) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for node in reversed(list(graph.nodes)):  # of what nothing else asks for
        if node.op == "call_function" and (op_of(node) in CHECKS or _unused(node, behind)):
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        if op_of(node) in ITEMS and not node.users:
            graph.erase_node(node)
        elif isinstance(value, (bool, int, float)):
            for user in list(node.users):
                swap = lambda arg, node=node, value=value: value if arg is node else arg  # noqa: E731
                user.args, user.kwargs = fx.map_arg(user.args, swap), fx.map_arg(user.kwargs, swap)
            graph.erase_node(node)
        elif isinstance(value, SYMBOLS):
            with graph.inserting_before(node):
                instead[node] = _number(graph, node)
            node.replace_all_uses_with(instead[node])
            graph.erase_node(node)
        elif any(isinstance(arg.meta.get("was"), SYMBOLS) for arg in node.all_input_nodes):
            with graph.inserting_before(node):
                instead[node] = _with_tensors(graph, node)
            node.replace_all_uses_with(instead[node])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):  # what only checks and numbers used
        if "was" in node.meta and not node.users:
            graph.erase_node(node)
    return instead


def _unused(node: fx.Node, behind: Collection[fx.Node]) -> bool:
    """Whether nothing takes a node that returns a number, or is behind a tensor whose shape depends on values. A size
    of such a tensor counts as taken where the tensor is, as it names the error."""
    writes = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    if node.users or draws(node) or node.target is COMPARED:
        return False
    if not (_is_number(node) or shaped_by_values(node) or (node in behind and not writes)):
        return False
    shaped = filter(shaped_by_values, node.all_input_nodes) if _is_number(node) else ()
    return all(_is_number(user) for one in shaped for user in one.users)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), SYMBOLS)


def _number(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A tensor of no dims in place of a number that `node` computes when the model runs."""
    symbol = node.meta["val"]
    tensor_value: Any
    if op_of(node) in ITEMS:
        tensor_value = call(graph, node, aten.detach.default, node.args[0])
        tensor_value = call(graph, node, aten.reshape.default, tensor_value, [])
    elif node.target in (torch.sym_float, torch.sym_int, float, int):
        tensor_value = node.args[0]
    elif node.target in BOUNDS and any(not isinstance(arg, fx.Node) for arg in node.args):
        (bounded,) = node.all_input_nodes
        (bound,) = (arg for arg in node.args if arg is not bounded)
        exact = call(graph, node, aten.to.dtype, bounded, _precision(symbol))
        tensor_value = call(graph, node, aten.clamp.default, exact, **{BOUNDS[node.target]: bound})
    elif node.target in ARITHMETIC and (node.target is not round or {*node.args[1:]} <= {None}):
        given = [arg for arg in node.args if arg is not None]
        tensors = [arg if isinstance(arg, fx.Node) else _full(graph, node, arg) for arg in given]
        if node.target is python_operator.truediv:  # which python does in double precision
            tensors = [call(graph, node, aten.to.dtype, tensor, torch.float64) for tensor in tensors]
        tensor_value = call(graph, node, ARITHMETIC[node.target], *tensors)
    elif op_of(node) in SIZES:
        raise goes_on(node)
    else:
        raise StrategyError(
            "MW902",
            f"{op_of(node)}{at(node)} computes a number from the values of a tensor, which is not known when the model "
            "is captured; keep it a tensor.",
        )
    tensor_value = call(graph, node, aten.to.dtype, tensor_value, _precision(symbol))
    tensor: fx.Node = tensor_value
    tensor.meta["was"] = symbol
    return tensor


def _precision(symbol: Any) -> torch.dtype:
    kind = bool if isinstance(symbol, torch.SymBool) else float if isinstance(symbol, torch.SymFloat) else int
    return PRECISION[kind]


def goes_on(node: fx.Node) -> StrategyError:
    """That a node, or the first function of selected elements that is not followed, takes a tensor whose shape depends
    on values."""
    stop = next((one for one in node.graph.nodes if STOPS in one.meta), None)
    who = f"The model{at(node)} goes on with" if stop is None else f"{stop.meta[STOPS]}{at(stop)} takes"
    return StrategyError(
        "MW902",
        f"{who} a tensor whose shape depends on values (indexed with a mask, nonzero, unique, bincount, ...), so the "
        "model is not one graph; use torch.where, multiply with the mask, ignore_index in a loss, bincount with "
        "minlength=N (torch.zeros(N).scatter_add of ones), or, for a value that is the same in every step, a buffer "
        "that is not saved (persistent=False). A child module that takes and returns tensors of fixed shapes, such as "
        "a loop over experts, is one operator.",
    )


def _full(graph: fx.Graph, node: fx.Node, number: Any) -> fx.Node:
    return call(graph, node, aten.full.default, [], number, dtype=PRECISION[type(number)])


def _with_tensors(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`node` with tensors where it took numbers: by the overload that accepts them."""
    recorded = node.meta["val"]
    if not isinstance(node.target, torch._ops.OpOverload) or shaped_by_values(node):
        raise StrategyError(
            "MW902",
            f"{op_of(node)}{at(node)} takes a shape or makes a choice from the values of a tensor (item), which are "
            "not known when the model is captured; use torch.where, masks, sizes that are Python numbers, or, for a "
            "constant, a buffer that is not saved (persistent=False). A child module that takes and returns tensors of "
            "fixed shapes is one operator.",
        )
    packet = node.target.overloadpacket
    if isinstance(scale := node.kwargs.get("alpha"), fx.Node):
        scaled = call(graph, node, aten.mul.Tensor, node.args[1], scale)
        return call(graph, node, node.target, node.args[0], scaled)
    if packet in FILLED and isinstance(number := node.args[FILLED[packet]], fx.Node):
        filled = call(graph, node, aten.to.dtype, number, recorded.dtype)
        return call(graph, node, aten.expand.default, filled, list(recorded.shape))
    for target in (node.target, *(getattr(packet, name) for name in packet.overloads())):
        if target._schema.is_mutable or any(argument.is_out for argument in target._schema.arguments):
            continue
        try:
            rebuilt = call(graph, node, target, *node.args, **node.kwargs)
        except (RuntimeError, TypeError):  # this overload takes no tensor there
            continue
        value = rebuilt.meta["val"]
        if isinstance(value, Tensor) and value.shape == recorded.shape:
            same = value.dtype == recorded.dtype
            return rebuilt if same else call(graph, node, aten.to.dtype, rebuilt, recorded.dtype)
        graph.erase_node(rebuilt)
    raise StrategyError(
        "MW902",
        f"{op_of(node)}{at(node)} takes a number that depends on the values of a tensor (item); keep it a tensor.",
    )
