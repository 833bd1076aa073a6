"""Reductions that are no line of notation: quantiles, whose number stands in front of the result, and histograms."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Sharding, sharding


@rule("quantile", "nanquantile")
def quantile(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x over one dim, or over all; several quantiles [q] stand in front of the result."""
    options = named(operator.target, operator.args, operator.keywords)
    rank, front = len(specs[0].shape), [None for spec in specs[1:] for _ in spec.shape]
    if options["dim"] is None or not rank:
        return None
    dim = options["dim"] % rank
    operand: Dims = tuple(None if i == dim else f"d{i}" for i in range(rank))
    result = operand if options["keepdim"] else (*operand[:dim], *operand[dim + 1 :])
    return sharding([operand, *[tuple(front)] * (len(specs) - 1)], [(*front, *result)], specs, operator.results)


@rule("histc")
def histogram(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Counts of the elements in bins of a given range: those of slices add up."""
    options = named(operator.target, operator.args, operator.keywords)
    if options["min"] == options["max"]:
        return None  # the range is that of the elements
    dims = tuple(f"d{i}" for i in range(len(specs[0].shape)))
    return sharding([dims], [(None,)], specs, operator.results, sums=dims)
