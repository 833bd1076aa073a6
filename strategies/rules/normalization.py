"""Operators that need whole the dims over which they normalise: softmax, layer norm, RMS norm."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.graph import Operator, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Sharding, sharding


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "softmin")
def softmax(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    rank = len(specs[0].shape)
    if rank == 0:
        return None
    dim = operator.keywords.get("dim", operator.args[1] if len(operator.args) > 1 else -1) % rank
    dims = tuple(None if i == dim else f"d{i}" for i in range(rank))
    return sharding([dims], [dims], specs, operator.results)


@rule("layer_norm", "rms_norm")
def layer_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    rank, normalised = len(specs[0].shape), len(operator.args[1])
    dims: Dims = tuple(f"d{i}" if i < rank - normalised else None for i in range(rank))
    affine: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    return sharding([dims, *affine], [dims], specs, operator.results)
