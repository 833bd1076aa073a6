"""Operators that need whole the dims over which they normalise: softmax, layer norm, RMS norm, group norm."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.graph import Operator, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Sharding, sharding


@rule("softmax", "log_softmax")
def softmax(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [...] normalised over one dim, which stays whole."""
    rank = len(specs[0].shape)
    if rank == 0:
        return None
    dim = operator.keywords.get("dim", operator.args[1] if len(operator.args) > 1 else -1) % rank
    dims: Dims = tuple(None if i == dim else f"d{i}" for i in range(rank))
    return sharding([dims], [dims], specs, operator.results)


@rule("layer_norm", "rms_norm")
def layer_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [..., n...] normalised over its last dims, which stay whole, and so do weight and bias [n...]."""
    rank, normalised = len(specs[0].shape), len(operator.args[1])
    dims: Dims = tuple(f"d{i}" if i < rank - normalised else None for i in range(rank))
    affine: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    return sharding([dims, *affine], [dims], specs, operator.results)


@rule("group_norm")
def group_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...]: only the batch can be sliced."""
    dims: Dims = ("d0", *(None,) * (len(specs[0].shape) - 1))
    affine: list[Dims] = [(None,) for _ in specs[1:]]
    return sharding([dims, *affine], [dims], specs, operator.results)
