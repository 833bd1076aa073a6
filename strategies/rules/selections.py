"""Operators that take parts of a tensor: the dims that they take from stay whole, the others pass.

They only move elements, so dims that pass may have padded slices. Invariant: a local program is the operator itself
with its own arguments; only sizes of dims that pass differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def dim_of(operator: Operator, rank: int) -> int:
    """The argument `dim` of a call on a tensor of `rank` dims, counted from the left."""
    return int(named(operator.target, operator.args, operator.keywords)["dim"]) % rank


def passing(rank: int, whole: Sequence[int]) -> Dims:
    """Factors d0, d1, ... of the dims that pass; None for those that stay whole."""
    return tuple(None if i in whole else f"d{i}" for i in range(rank))


def named_dims(dims: Dims) -> tuple[str, ...]:
    """The factors among dims."""
    return tuple(dim for dim in dims if dim is not None)


def same_dims(operator: Operator, specs: Sequence[TensorSpec], whole: Sequence[int]) -> Sharding:
    """x [...] -> results of the same rank; `whole` are the dims that cannot be sliced."""
    dims = passing(len(specs[0].shape), whole)
    return sharding([dims], [dims] * len(operator.results), specs, operator.results, uneven=named_dims(dims))


@rule(*"chunk narrow split split_with_sizes tensor_split unsafe_chunk unsafe_split unsafe_split_with_sizes".split())
def parts(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x -> one part of a dim, or all of them."""
    if len(specs) > 1:
        return None  # places to split at, or to begin at, as a tensor
    return same_dims(operator, specs, [dim_of(operator, len(specs[0].shape))])


@rule("dsplit", "hsplit", "vsplit")
def parts_of_one(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x -> all parts of the dim 2, 1 (of a vector: 0) or 0."""
    dim = {"dsplit": 2, "hsplit": min(1, len(specs[0].shape) - 1), "vsplit": 0}[operator.op]
    return same_dims(operator, specs, [dim])


def _identity(operator: Operator, local: Local) -> Ref:
    return local.call("aten.alias.default", local.args[0])


@rule("slice")
def slice_(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x[start:end:step] along one dim; a slice of everything passes."""
    rank = len(specs[0].shape)
    if specs[0].shape != operator.results[0].shape:
        return same_dims(operator, specs, [dim_of(operator, rank)])
    dims = passing(rank, ())
    return sharding([dims], [dims], specs, operator.results, local=_identity, uneven=named_dims(dims))


@rule("select", "unbind")
def drop_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """One position of a dim, or every one as a result of its own."""
    rank = len(specs[0].shape)
    dims = passing(rank, [dim_of(operator, rank)])
    result = named_dims(dims)
    return sharding([dims], [result] * len(operator.results), specs, operator.results, uneven=result)


@local_function
def triangle_slice(x: Tensor, lower: bool, diagonal: int, row: int, column: int) -> Tensor:
    """The lower or upper triangle of a matrix, of which x is the block that begins at (row, column)."""
    return x.tril(diagonal + row - column) if lower else x.triu(diagonal + row - column)


def _triangle(operator: Operator, local: Local) -> Ref:
    shape = local.operand_shape(0)
    row, column = (local.position(f"d{i}", shape[i]) for i in (len(shape) - 2, len(shape) - 1))
    diagonal = named(operator.target, operator.args, operator.keywords)["diagonal"]
    return local.call("local.triangle_slice", local.args[0], operator.op == "tril", diagonal, row, column)


@rule("tril", "triu")
def triangle(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The last two dims are a matrix, with the rest set to zero."""
    dims = tuple(f"d{i}" for i in range(len(specs[0].shape)))
    return sharding([dims], [dims], specs, operator.results, local=_triangle, uneven=dims)


@rule("flip", "roll")
def reorder(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """flip(x, dims), roll(x, shifts, dims); roll without dims runs over the flattened tensor."""
    rank, dims = len(specs[0].shape), named(operator.target, operator.args, operator.keywords)["dims"]
    if operator.op == "roll" and not dims:
        return None
    return same_dims(operator, specs, [dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)])


@rule("fliplr", "flipud")
def mirror(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The dim 1, or the dim 0, in reverse order."""
    return same_dims(operator, specs, [1 if operator.op == "fliplr" else 0])


@rule("rot90")
def rotation(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """A quarter turn, or several, of two dims."""
    rank, options = len(specs[0].shape), named(operator.target, operator.args, operator.keywords)
    return same_dims(operator, specs, [dim % rank for dim in options["dims"]])


@rule("unfold")
def unfold(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x -> windows of one dim in its place, and what is in a window as the last dim."""
    rank = len(specs[0].shape)
    dim = int(named(operator.target, operator.args, operator.keywords)["dimension"]) % rank
    dims = passing(rank, [dim])
    return sharding([dims], [(*dims, None)], specs, operator.results, uneven=named_dims(dims))


@rule("diagonal", "linalg_diagonal")
def diagonal(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The diagonal of two dims as the last dim."""
    rank, options = len(specs[0].shape), named(operator.target, operator.args, operator.keywords)
    dims = passing(rank, [options["dim1"] % rank, options["dim2"] % rank])
    rest = named_dims(dims)
    return sharding([dims], [(*rest, None)], specs, operator.results, uneven=rest)


@rule("diag_embed")
def diag_embed(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The last dim as the diagonal of two dims."""
    rank = len(operator.results[0].shape)
    options = named(operator.target, operator.args, operator.keywords)
    result = passing(rank, [options["dim1"] % rank, options["dim2"] % rank])
    rest = named_dims(result)
    return sharding([(*rest, None)], [result], specs, operator.results, uneven=rest)
