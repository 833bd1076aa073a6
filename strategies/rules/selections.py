"""Operators that select, order or join elements along one dim (or a few): those stay whole, the others pass.

Invariant: a local program is the operator itself with its own arguments; only sizes of dims that pass differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding

DIM = {
    "argsort": (1, -1),
    "chunk": (2, 0),
    "cumprod": (1, 0),
    "cumsum": (1, 0),
    "diff": (2, -1),
    "narrow": (1, 0),
    "select": (1, 0),
    "slice": (1, 0),
    "sort": (1, -1),
    "split": (2, 0),
    "split_with_sizes": (2, 0),
    "tensor_split": (2, 0),
    "topk": (2, -1),
    "unbind": (1, 0),
}
"""Position of `dim` among the arguments, and its default."""


def _dim(operator: Operator, rank: int) -> int:
    position, default = DIM[operator.op]
    dim = operator.keywords.get("dim", operator.args[position] if len(operator.args) > position else default)
    return int(dim) % rank


def _names(rank: int, whole: Sequence[int]) -> Dims:
    return tuple(None if i in whole else f"d{i}" for i in range(rank))


def _one_operand(operator: Operator, specs: Sequence[TensorSpec], whole: Sequence[int]) -> Sharding:
    """x [...] -> results of the same rank; `whole` are the dims that cannot be sliced."""
    dims = _names(len(specs[0].shape), whole)
    return sharding([dims], [dims] * len(operator.results), specs, operator.results)


@rule(*"argsort chunk cumprod cumsum diff narrow sort split split_with_sizes tensor_split topk".split())
def along_one_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    rank = len(specs[0].shape)
    if rank == 0 or len(specs) > 1:  # further tensors: places to split at, or what diff puts in front
        return None
    return _one_operand(operator, specs, [_dim(operator, rank)])


def _identity(operator: Operator, local: Local) -> Ref:
    return local.call("aten.alias.default", local.args[0])


@rule("slice")
def slice_(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x[start:end:step] along one dim; a slice of everything passes."""
    rank = len(specs[0].shape)
    if specs[0].shape != operator.results[0].shape:
        return _one_operand(operator, specs, [_dim(operator, rank)])
    dims = _names(rank, ())
    return sharding([dims], [dims], specs, operator.results, local=_identity)


@rule("select", "unbind")
def drop_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """One position of a dim, or every one as a result of its own."""
    rank = len(specs[0].shape)
    whole = _dim(operator, rank)
    dims = _names(rank, [whole])
    result = tuple(name for i, name in enumerate(dims) if i != whole)
    return sharding([dims], [result] * len(operator.results), specs, operator.results)


@rule("tril", "triu")
def triangle(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The last two dims stay whole."""
    rank = len(specs[0].shape)
    return _one_operand(operator, specs, [rank - 2, rank - 1])


@rule("flip", "roll")
def reorder(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """flip(x, dims), roll(x, shifts, dims); roll without dims runs over the flattened tensor."""
    rank, dims = len(specs[0].shape), operator.args[1 if operator.op == "flip" else 2 :]
    if not dims or not dims[0]:
        return None
    return _one_operand(operator, specs, [dim % rank for dim in dims[0]])


@rule("pad", "constant_pad_nd")
def pad(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """pad(x, (last dim's left, right, the dim before's left, ...)): dims that get something stay whole."""
    rank, widths = len(specs[0].shape), operator.args[1]
    whole = [rank - 1 - i // 2 for i, width in enumerate(widths) if width]
    return _one_operand(operator, specs, whole)


@rule("cat", "concat")
def cat(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Tensors joined along a dim that they have."""
    rank = len(operator.results[0].shape)
    if any(len(spec.shape) != rank for spec in specs):
        return None  # torch lets empty one-dimensional tensors through
    dims = _names(rank, [_join_dim(operator, rank)])
    return sharding([dims] * len(specs), [dims], specs, operator.results)


@rule("stack")
def stack(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Tensors joined along a new dim."""
    rank = len(operator.results[0].shape)
    new = _join_dim(operator, rank)
    dims = _names(rank, [new])
    return sharding([dims[:new] + dims[new + 1 :]] * len(specs), [dims], specs, operator.results)


def _join_dim(operator: Operator, rank: int) -> int:
    dim = operator.keywords.get("dim", operator.args[1] if len(operator.args) > 1 else 0)
    return int(dim) % rank
