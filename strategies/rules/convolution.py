"""Convolutions: factors n (batch), o (channels out) and i (channels in, summed over), or g (groups of channels).

The spatial dims and the kernel stay replicated. As in products, the first slice of a summed factor adds the bias.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import changed, named
from strategies.rules.notation import notation
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def _convolution(operator: Operator, local: Local) -> Ref:
    given = named(operator.target, local.args, local.kwargs)
    changes = {}
    if local.slices("g") > 1:
        changes["groups"] = given["groups"] // local.slices("g")
    if local.slices("i") > 1 and given["bias"] is not None:
        changes["bias"] = local.call("local.first_slice_only", given["bias"], local.position("i"))
    args, kwargs = changed(operator.target, local.args, local.kwargs, **changes)
    return local.call(operator.target, *args, **kwargs)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) i, ...], weight [o, i, ...] (transposed: [i, o, ...]), bias [o] -> [(n,) o, ...]. In groups, dim 0 of the
    weight and both channel dims have factor g."""
    given = named(operator.target, operator.args, operator.keywords)
    transposed = operator.op.startswith("conv_transpose") or given.get("transposed", False)
    weight, spatial = specs[1].shape, (None,) * (len(specs[1].shape) - 2)
    lead = ("n",) if len(specs[0].shape) == len(weight) else ()
    into, out = ("g", "g") if given["groups"] > 1 else ("i", "o")
    kernel: Dims = ("g", None) if given["groups"] > 1 else ("i", "o") if transposed else ("o", "i")
    operands: list[Dims] = [(*lead, into, *spatial), (*kernel, *spatial)]
    bias: list[Dims] = [(out,) for _ in specs[2:]]
    moved = specs[0] if transposed else operator.results[0]  # every element of it meets one filter
    return sharding(
        [*operands, *bias],
        [(*lead, out, *spatial)],
        specs,
        operator.results,
        sums=() if given["groups"] > 1 else ["i"],
        local=_convolution,
        flops=2.0 * moved.elements * specs[1].elements / weight[0],
        sizes={"g": given["groups"]},
        padded=("n", "o"),
    )


@rule("conv_tbc")
def time_first(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [t, n, i], weight [k, i, o], bias [o] -> [t, n, o]."""
    flops = 2.0 * operator.results[0].elements * specs[1].elements / specs[1].shape[2]
    line = "!t n i, !k i o, +o -> !t n o"
    return notation(line, operator, specs, padded=True, local=_convolution, flops=flops)
