"""How to draw each operator that has a rule: a table from operator names to draws, one family per file.

A draw takes operands from the pool (or new sources), chooses arguments and emits the operator in a form in which
exported models call it. Invariant: drawn calls are differentiable where they are drawn: no ties, kinks or poles nearby.
"""

from __future__ import annotations

from tests.fuzz.generators import (
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
)

__all__ = ["FAMILIES", "GENERATORS"]
