"""What a search tells beside its plan, in words: the mesh that it chose with the runner-up, and what propagation
followed.

Invariant: made from plan.json's `search` alone, so the command, explain and the report say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mesh_line(told: Mapping[str, Any]) -> str | None:
    """The mesh and how much slower the next one would be; None where somebody named the mesh."""
    if told.get("mesh") is None:
        return None
    best, second = told["mesh"], told["runner_up"]
    shown = f"mesh: {_sizes(best)}, the best of {told['meshes'] + told['left_out']} factorisations of the ranks"
    if told["left_out"]:
        shown += f" ({told['left_out']} left out by bounds)"
    if second is None:
        return f"{shown}; the others that were searched have the same best plan, so there is no runner-up"
    slower = second["seconds"] / best["seconds"] - 1 if best["seconds"] else 0.0
    return (
        f"{shown}; the runner-up {_sizes(second)} takes {second['seconds']:.4g} s per step, {100 * slower:.2g} % more"
    )


def propagation_line(told: Mapping[str, Any]) -> str | None:
    """What propagation ended with; None for other searches, and where both plans cost the same."""
    prices = told.get("propagation")
    if prices is None or prices["cheapest"] >= prices["followed"]:
        return None
    followed, cheapest = (f"{prices[key]:.4g} s" for key in ("followed", "cheapest"))
    if prices["by_price"]:
        return f"propagation: {cheapest} per step, decided again by price; followed step by step it was {followed}"
    return (
        f"propagation: followed step by step, {followed} per step; by price alone, {cheapest} around the same "
        "strategies (parallel.search=dynamic_programming)"
    )


def lines(told: Mapping[str, Any]) -> list[str]:
    """All that there is to tell."""
    return [line for line in (mesh_line(told), propagation_line(told)) if line is not None]


def _sizes(mesh: Mapping[str, Any]) -> str:
    return " x ".join(map(str, mesh["mesh"])) or "1"
