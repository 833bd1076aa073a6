"""Grouped matrix products of experts: rows x [t, k] sorted by expert, weights [e, k, n], end offsets of each expert's
rows [e] -> [t, n].

Factors t (rows), k (contraction), n (columns) and e (experts). A slice of the rows takes its part of every expert's
range; a slice of the experts computes the rows of its experts and leaves zeros elsewhere: a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Local, Sharding, sharding


@local_function
def expert_products(x: Tensor, weights: Tensor, ends: Tensor, first_row: int, first_expert: int) -> Tensor:
    """The rows of the experts in `weights`, of the rows in `x`; zeros for the other rows.

    x [t/slices, k] holds the rows from `first_row` on, weights [e/slices, k, n] the experts from `first_expert` on;
    `ends` [e] are those of all experts. Experts past the end of `ends` have no rows.
    """
    bounds = [0, *ends.tolist()][first_expert : first_expert + len(weights) + 1]
    inside = [min(max(bound - first_row, 0), len(x)) for bound in bounds]
    sizes = [inside[0], *(stop - start for start, stop in pairwise(inside)), len(x) - inside[-1]]
    before, *parts = torch.split(x, sizes)
    *own, after = parts
    products = [rows @ matrix for rows, matrix in zip(own, weights.unbind(0), strict=False)]
    columns = weights.shape[2]
    return torch.cat((x.new_zeros(len(before), columns), *products, x.new_zeros(len(after), columns)))


def _experts(operator: Operator, local: Local) -> Ref:
    if operator.op == "_grouped_mm" and local.slices("t", "k", "n", "e") == 1:
        return local.call(operator.target, *local.args, **local.kwargs)
    x, weights, ends = local.args[:3] if len(local.args) > 2 else (*local.args, local.kwargs["offs"])
    first_row = local.position("t", local.operand_shape(0)[0])
    first_expert = local.position("e", local.operand_shape(1)[0])
    return local.call("local.expert_products", x, weights, ends, first_row, first_expert)


@rule("_grouped_mm", "grouped_mm_fallback")
def grouped_mm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """torch's product, and the one that Hugging Face models bring along (a rank need not know it: it always runs
    `expert_products`)."""
    if [len(spec.shape) for spec in specs] != [2, 3, 1] or operator.results[0].dtype != specs[0].dtype:
        return None  # groups of columns, a bias, or a product in another dtype
    (rows, inner), columns = specs[0].shape, specs[1].shape[2]
    return sharding(
        [("t", "k"), ("e", "k", "n"), (None,)],
        [("t", "n")],
        specs,
        operator.results,
        sums=("k", "e"),
        local=_experts,
        flops=2.0 * rows * inner * columns,
        padded=("t", "n", "e"),
    )
