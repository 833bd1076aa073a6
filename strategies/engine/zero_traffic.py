"""Bytes that ZeRO sends, as plans predict them. Knows nothing of DeepSpeed but what it sends at each stage."""

from __future__ import annotations

import math

from strategies.engine.program import Program
from strategies.engine.updates import learning, local_elements, parameters
from strategies.redistribution import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER


def predicted(program: Program, stage: int, accumulate: int = 1) -> dict[str, int]:
    """Bytes that one rank sends per optimizer step for gradients and weights, by collective, without padding and norms.

    A replica group of n ranks that hold b bytes of weights sends, per rank: at stages 1 and 2 an all-reduce of the fp32
    gradients (2 (n-1)/n of their bytes; after every micro-batch at stage 2) and one all-gather of the new weights
    ((n-1)/n b); at stage 3, per micro-batch, a reduce-scatter of the gradients ((n-1)/n) and an all-gather of the
    weights for forward and for backward.
    """
    totals = {ALL_REDUCE: 0.0, REDUCE_SCATTER: 0.0, ALL_GATHER: 0.0}
    names = set(learning(program))
    for source in parameters(program):
        elements = local_elements(program, source)
        n = program.mesh.product(program.layouts[source.id].replica_axes(program.mesh))
        share, learns = elements * (n - 1) / n, source.name in names
        if stage == 3:
            totals[REDUCE_SCATTER] += accumulate * share * 4 * learns
            totals[ALL_GATHER] += accumulate * share * source.spec.item_bytes * (1 + learns)
        else:
            totals[ALL_REDUCE] += (accumulate if stage == 2 else 1) * 2 * share * 4 * learns
            totals[ALL_GATHER] += share * source.spec.item_bytes * learns
    return {kind: math.ceil(total) for kind, total in totals.items() if total}
