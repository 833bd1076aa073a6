"""Operators that take parts of a tensor: the dims that they take from stay replicated, the others pass.

They only move elements, so dims that pass may have padded slices. Invariant: a local program is the operator itself
with its own arguments; only sizes of dims that pass differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.notation import notation
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def dim_of(operator: Operator, rank: int) -> int:
    """The argument `dim` of a call on a tensor of `rank` dims, counted from the left."""
    return int(named(operator.target, operator.args, operator.keywords)["dim"]) % rank


def passing(rank: int, whole: Sequence[int]) -> Dims:
    """Factors d0, d1, ... of the dims that pass; None for those that stay replicated."""
    return tuple(None if i in whole else f"d{i}" for i in range(rank))


def named_dims(dims: Dims) -> tuple[str, ...]:
    """The factors among dims."""
    return tuple(dim for dim in dims if dim is not None)


def same_dims(operator: Operator, specs: Sequence[TensorSpec], whole: Sequence[int]) -> Sharding:
    """x [...] -> results of the same rank; the dims in `whole` cannot be sliced."""
    dims = passing(len(specs[0].shape), whole)
    return sharding([dims], [dims] * len(operator.results), specs, operator.results, padded=named_dims(dims))


def _identity(operator: Operator, local: Local) -> Ref:
    return local.call("aten.alias.default", local.args[0])


@rule("slice")
def slice_(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x[start:end:step] along one dim; a slice of everything passes."""
    if specs[0].shape != operator.results[0].shape:
        return notation("... -> ... ; !dim", operator, specs, padded=True)
    return notation("... -> ...", operator, specs, padded=True, local=_identity)


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
def triangle(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """The last two dims are a matrix, with the rest set to zero."""
    return notation("... -> ...", operator, specs, padded=True, local=_triangle)


@rule("diag_embed")
def diag_embed(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The last dim as the diagonal of two dims."""
    rank = len(operator.results[0].shape)
    options = named(operator.target, operator.args, operator.keywords)
    result = passing(rank, [options["dim1"] % rank, options["dim2"] % rank])
    rest = named_dims(result)
    return sharding([(*rest, None)], [result], specs, operator.results, padded=rest)
