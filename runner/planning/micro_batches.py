"""Whether the loss of a batch is that of its micro-batches, by numbers: that of two in one, and of each alone.

Models and losses may take rows together in forms that `coupled_rows` does not see. Invariant: nothing of the module
changes, and what is found compares the same rows with the same weights of means as a step takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from runner.planning.counted import AddedRows, Counted, Divisor, mean_weights, shares
from strategies.capture import Objective, loss_in
from strategies.capture.duplicate import duplicate
from strategies.core.graph import OperatorGraph
from strategies.rules import rule_of
from strategies.rules.random import draws

FLOPS = 1e10
"""Of a micro-batch, forward: larger ones are not tried."""
ROUNDING = {"float32": 3e-5, "float64": 1e-8}
"""By which losses may differ that are computed in another order, relative to them and to 0.1, by the dtype of what is
rounded most."""


def apart(
    step: Objective,
    graph: OperatorGraph,
    micro_batches: Callable[[], Sequence[Sequence[Tensor]]],
    counted: Counted | Divisor | AddedRows | None,
    means: Sequence[Counted | Divisor | None],
    unbatched: Collection[str],
) -> tuple[float, float] | None:
    """The loss of several micro-batches in one, and what a step makes of their losses, where these are not the same.

    None where they are, or where that is not known: of one micro-batch, of larger models, of those that draw random
    numbers other than by dropout or run on one size alone, and in 16 bits.

    Args:
        step: the model and its loss.
        graph: of a micro-batch.
        micro_batches: reads the entries of each, of equal shapes.
        counted, means: of `Prepared`, by which micro-batches count.
        unbatched: the names of entries without rows.
    """
    drawing = [operator.op for operator in graph.operators if draws(operator)]
    precision = next(step.parameters()).dtype
    within = {result.dtype for operator in graph.operators for result in operator.results if result.floating}
    tolerance = max((ROUNDING.get(dtype, math.inf) for dtype in within), default=math.inf)
    drops = all("dropout" in op or op == "scaled_dot_product_attention" for op in drawing)
    if not drops or math.isinf(tolerance) or sum(rule_of(one, graph).flops for one in graph.operators) > FLOPS:
        return None
    parts = micro_batches()
    if len(parts) == 1:
        return None
    named = [*zip(step.names, zip(*parts, strict=True), strict=True)]
    joined = [each[0] if name in unbatched or not each[0].dim() else torch.cat(each) for name, each in named]
    alone, trains = Objective(step.model, step.loss, step.names, [*step.targets]), not drawing
    try:
        complete = _loss(alone, joined, trains)
        if means:
            each = [[1 / len(parts)] * len(parts) if one is None else _shares(one, parts) for one in means]
            weighed = alone.weighed(len(means))
            weights = [[share * len(parts) for share in own] for own in zip(*each, strict=True)]
            name = "fp64" if precision == torch.float64 else "fp32"
            pairs = zip(parts, weights, strict=True)
            found = [_loss(weighed, [*part, *mean_weights(own, name)], trains) / len(parts) for part, own in pairs]
        else:
            own = [1 / len(parts)] * len(parts) if counted is None else _shares(counted, parts)
            found = [share * _loss(alone, part, trains) for share, part in zip(own, parts, strict=True) if share]
    except Exception:  # whatever a forward raises for another size, or for rows with which the ranks name the operator
        return None
    difference = abs(sum(found) - complete)
    return (complete, sum(found)) if difference > tolerance * max(abs(complete), 0.1) else None


def _shares(counted: Counted | Divisor | AddedRows, parts: Sequence[Sequence[Tensor]]) -> list[float]:
    if isinstance(counted, AddedRows):
        return [1.0] * len(parts)
    blocks = tuple((0, size) for size in parts[0][counted.entry].shape)
    return shares([counted.of(part, blocks) for part in parts], counted)


def _loss(step: Objective, entries: Sequence[Tensor], trains: bool) -> float:
    """The loss of a copy, which drops nothing where it does not train."""
    copy = duplicate(step).train()
    for part in copy.modules():
        part.training = trains or isinstance(part, nn.modules.batchnorm._BatchNorm)
    loss = loss_in(copy(*(entry.clone() for entry in entries)))
    assert isinstance(loss, Tensor)
    return float(loss.detach())
