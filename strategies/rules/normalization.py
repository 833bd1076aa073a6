"""Layer norm and RMS norm, whose last dims stay replicated; group norm is sliced by groups of channels, weight norm by
the vectors that have a norm each.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import changed, named
from strategies.rules.notation import notation
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


@rule("layer_norm", "rms_norm")
def layer_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [..., n...] normalised over its last dims, which stay replicated, and so do weight and bias [n...]."""
    rank, normalised = len(specs[0].shape), len(operator.args[1])
    dims: Dims = tuple(f"d{i}" if i < rank - normalised else None for i in range(rank))
    affine: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    eps = named(operator.target, operator.args, operator.keywords)["eps"]
    padded = (
        () if eps == 0 else [name for name in dims if name is not None]
    )  # padding of equal elements would be divided by zero
    return sharding([dims, *affine], [dims], specs, operator.results, padded=padded)


def _group_norm(operator: Operator, local: Local) -> Ref:
    groups = local.args[1] // local.slices("g")
    args, kwargs = changed(operator.target, local.args, local.kwargs, num_groups=groups)
    return local.call(operator.target, *args, **kwargs)


@rule("group_norm")
def group_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [n, c, ...], weight [c], bias [c]: the batch, and the channels by groups."""
    sizes = {"g": operator.args[1]}
    return notation("n g !..., g* -> n g !...", operator, specs, sizes=sizes, local=_group_norm)


@rule("_weight_norm")
def weight_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """v [...] and g, the norms that v shall have over all dims but one (of size 1 in g): that one passes."""
    rank, dim = len(specs[0].shape), named(operator.target, operator.args, operator.keywords)["dim"]
    if len(specs[1].shape) != rank or dim < 0:
        return None  # one norm of everything
    dims: Dims = tuple(f"d{i}" if i == dim else None for i in range(rank))
    return sharding([dims, dims], [dims], specs, operator.results)
