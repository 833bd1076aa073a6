"""Random calls of each operator that has a rule: a table from operator names to generators, one family per file.

A generator takes operands from the pool (or new sources), chooses arguments and emits the operator in a form in which
exported models call it. Invariant: generated calls are differentiable at their operands: no ties, kinks or poles.
"""

from __future__ import annotations

from tests.fuzz.generators import (
    decompositions,
    factories,
    indexing,
    joins,
    losses,
    networks,
    normalization,
    pointwise,
    products,
    random,
    reductions,
    selections,
    spectral,
    views,
)
from tests.fuzz.generators.table import GENERATORS

FAMILIES = (
    pointwise,
    products,
    views,
    selections,
    joins,
    indexing,
    reductions,
    normalization,
    networks,
    losses,
    random,
    factories,
    spectral,
    decompositions,
)
WITHOUT = {
    "_grouped_mm": "its kernel takes no double precision",
    "cauchy": "its numbers are too far apart to compare",
    "compared": "it raises for other numbers than those of a batch",
    "empty": "what it returns is not defined",
    "empty_like": "what it returns is not defined",
    "transformers::grouped_mm_fallback": "it exists only where transformers is imported",
    "multinomial": "it draws by probabilities that rounding may tip over",
    "new_empty": "what it returns is not defined",
    "random": "its numbers are too large to compare",
}
"""Operators with a rule that are not generated, and why."""

__all__ = ["FAMILIES", "GENERATORS", "WITHOUT"]
