"""Reductions. Sums leave partial sums over a sliced dim, means leave partial sums of local means divided by the slices; other
reductions need their dims whole."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.pointwise import pointwise
from strategies.rules.registry import rule
from strategies.rules.sharding import Local, Sharding, sharding


def _reduced(operator: Operator, rank: int) -> tuple[set[int], bool]:
    """The dims that the call reduces, and whether it keeps them with size 1."""
    arguments = operator.args[1:]
    if operator.op in ("linalg_vector_norm", "norm", "std", "var", "logsumexp") and operator.op == "linalg_vector_norm":
        arguments = arguments[1:]
    dims = operator.keywords.get("dim", arguments[0] if arguments else None)
    if isinstance(dims, bool) or dims is None or dims == ():
        dims = tuple(range(rank))
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    reduced = {dim % rank for dim in dims} if rank else set()
    kept = len(operator.results[0].shape) == rank and rank > 0 and len(reduced) > 0
    return reduced, kept


def _reduction(operator: Operator, specs: Sequence[TensorSpec], *, additive: bool) -> Sharding:
    rank = len(specs[0].shape)
    reduced, kept = _reduced(operator, rank)
    names: list[str | None] = [f"d{i}" for i in range(rank)]
    operand = tuple(name if additive or i not in reduced else None for i, name in enumerate(names))
    result = tuple(None if i in reduced else name for i, name in enumerate(names) if kept or i not in reduced)
    sums = [name for i, name in enumerate(operand) if name is not None and i in reduced]
    local = _mean if operator.op == "mean" else None
    return sharding([operand], [result] * len(operator.results), specs, operator.results, sums=sums, local=local)


def _mean(operator: Operator, local: Local) -> Ref:
    value = local.call(operator.target, *local.args, **local.kwargs)
    rank = len(local.operand_shape())
    slices = local.slices(*(f"d{dim}" for dim in sorted(_reduced(operator, rank)[0])))
    return value if slices == 1 else local.call("aten.div.Tensor", value, slices)


@rule("sum", "mean")
def additive(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return _reduction(operator, specs, additive=True)


@rule("amax", "amin", "prod", "any", "all", "argmax", "argmin", "logsumexp", "std", "var", "var_mean", "std_mean", "linalg_vector_norm", "median", "mode")
def whole_dims(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return _reduction(operator, specs, additive=False)


@rule("max", "min")
def extremum(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Of two tensors: pointwise. Over a dim: that dim whole."""
    return pointwise(operator, specs) if len(specs) == 2 else _reduction(operator, specs, additive=False)
