"""Losses of elements and of rows, with every reduction. Sliced elements or rows leave partial sums; the dim over which
a row's own loss is taken stays replicated.

A mean over slices of equal size is the mean of one slice divided by the number of slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.notation import broadcast_dims
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding

NONE, MEAN, SUM = 0, 1, 2
"""torch's codes for `reduction`."""

ELEMENTS = {
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "hinge_embedding_loss": 3,
    "huber_loss": 2,
    "kl_div": 2,
    "l1_loss": 2,
    "margin_ranking_loss": 4,
    "mse_loss": 2,
    "poisson_nll_loss": 5,
    "smooth_l1_loss": 2,
    "soft_margin_loss": 2,
}
"""Losses of elements: position of `reduction` among the arguments."""
ROWS = {
    "cosine_embedding_loss": 4,
    "multi_margin_loss": 5,
    "multilabel_margin_loss": 2,
    "triplet_margin_loss": 7,
}
"""Losses of rows [..., d], with targets per row [...] or per element."""


def _reduction(operator: Operator) -> int:
    position = (ELEMENTS | ROWS)[operator.op]
    given = operator.args[position] if len(operator.args) > position else MEAN
    return int(operator.keywords.get("reduction", given))


def _mean_of_slices(operator: Operator, local: Local) -> Ref:
    value = local.call(operator.target, *local.args, **local.kwargs)
    ranks = [len(local.operand_shape(i)) for i in range(len(operator.operands))]
    slices = local.slices(*(f"d{i}" for i in range(max(ranks))))
    if _reduction(operator) != MEAN or slices == 1:
        return value
    return local.call("aten.div.Tensor", value, slices)


@rule(*ELEMENTS)
def element_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Operands that broadcast to one shape; the mean is over that shape."""
    rank = max(len(spec.shape) for spec in specs)
    padded = [(1,) * (rank - len(spec.shape)) + spec.shape for spec in specs]
    shape = tuple(map(max, zip(*padded, strict=True)))
    names = tuple(f"d{i}" for i in range(rank))
    reduced = _reduction(operator) != NONE
    return sharding(
        broadcast_dims(specs, shape),
        [() if reduced else names],
        specs,
        operator.results,
        sums=names if reduced else (),
        local=_mean_of_slices,
    )


@rule(*ROWS)
def row_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [n, d] (or more leading dims), others like it, and targets [n]; a single row has nothing to slice."""
    shape = specs[0].shape
    names = tuple(f"d{i}" for i in range(len(shape) - 1))
    rows: list[Dims] = []
    for position, spec in enumerate(specs):
        if operator.op == "multi_margin_loss" and position == 2:  # a weight per class
            rows.append((None,))
        elif spec.shape == shape and names:
            rows.append((*names, None))
        elif spec.shape == shape[:-1] and names:
            rows.append(names)
        else:
            return None
    reduced = _reduction(operator) != NONE
    result = () if reduced else names
    sums = names if reduced else ()
    return sharding(rows, [result], specs, operator.results, sums=sums, local=_mean_of_slices)
