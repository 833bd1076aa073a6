"""Operators that need whole the dims over which they normalise or compare: softmax, layer norm, RMS norm, gated units,
similarities. Group norm is sliced by whole groups of channels, weight norm by the vectors that have a norm each.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import changed, named
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def _factors(dims: Dims) -> tuple[str, ...]:
    return tuple(name for name in dims if name is not None)


@rule("layer_norm", "rms_norm")
def layer_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [..., n...] normalised over its last dims, which stay whole, and so do weight and bias [n...]."""
    rank, normalised = len(specs[0].shape), len(operator.args[1])
    dims: Dims = tuple(f"d{i}" if i < rank - normalised else None for i in range(rank))
    affine: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    eps = named(operator.target, operator.args, operator.keywords)["eps"]
    uneven = () if eps == 0 else _factors(dims)  # padding of equal elements would be divided by zero
    return sharding([dims, *affine], [dims], specs, operator.results, uneven=uneven)


def _group_norm(operator: Operator, local: Local) -> Ref:
    groups = local.args[1] // local.slices("g")
    args, kwargs = changed(operator.target, local.args, local.kwargs, num_groups=groups)
    return local.call(operator.target, *args, **kwargs)


@rule("group_norm")
def group_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...], weight [c], bias [c]: the batch, and the channels in whole groups."""
    dims: Dims = ("n", "g", *(None,) * (len(specs[0].shape) - 2))
    affine: list[Dims] = [("g",) for _ in specs[1:]]
    sizes = {"g": operator.args[1]}
    return sharding([dims, *affine], [dims], specs, operator.results, local=_group_norm, sizes=sizes)


@rule("_weight_norm")
def weight_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """v [...] and g, the norms that v shall have over all dims but one (of size 1 in g): that one passes."""
    rank, dim = len(specs[0].shape), named(operator.target, operator.args, operator.keywords)["dim"]
    if len(specs[1].shape) != rank or dim < 0:
        return None  # one norm of everything
    dims: Dims = tuple(f"d{i}" if i == dim else None for i in range(rank))
    return sharding([dims, dims], [dims], specs, operator.results)
