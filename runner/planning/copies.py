"""`parallel.copies`: the graph of a training step in which the batch has several copies, made from the model's.

The model is captured a second time for the rows of one copy, which tells every size that depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runner.config.schema import Config
from runner.errors import ConfigError
from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.lowering.batch_splits import in_copies


def own_rows(config: Config) -> int:
    """Rows of a micro-batch that each copy has. Raises ConfigError for rows that cannot be divided so."""
    rows, count = config.data.batch_size // config.parts, config.parallel.copies
    if rows % count:
        raise ConfigError(
            "MW440",
            f"parallel.copies = {count} divides the rows of a micro-batch, but there are {rows} (data.batch_size = "
            f"{config.data.batch_size} in {config.parts} micro-batches); take a multiple of {count}, or fewer copies.",
        )
    return rows // count


def of_step(
    config: Config, step: Objective, tensors: Sequence[Tensor], graph: OperatorGraph, plan: Plan
) -> tuple[OperatorGraph, Plan]:
    """What a training step computes: the model's `graph` and its `plan`, or both in copies. Raises ConfigError and
    StrategyError for a batch that cannot be divided so."""
    count = config.parallel.copies
    if count == 1:
        return graph, plan
    rows, own = config.data.batch_size // config.parts, own_rows(config)
    part = capture(step, [one[:own] if one.dim() and len(one) == rows else one for one in tensors], training=True)
    made = in_copies(graph, part.graph, plan, count, own, exact=config.train.random == "exact")
    return made.graph, made.plan
