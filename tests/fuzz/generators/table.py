"""The table from operator names to generators, and how families register theirs."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.pool import Pool

Draw = Callable[[Pool, str], None]
"""Emits the named operator into a pool, or raises Rejected."""
GENERATORS: dict[str, Draw] = {}


def draws(*operators: str) -> Callable[[Draw], Draw]:
    """Register a generator for operators, by the names under which rules are registered."""

    def register(draw: Draw) -> Draw:
        for name in operators:
            if name in GENERATORS:
                raise ValueError(f"Operator {name} has two generators.")
            GENERATORS[name] = draw
        return draw

    return register
